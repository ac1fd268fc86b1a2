"""Two curves as SVG: time per token over prompt length, and time of a decode step over the number of sequences."""

import re
import statistics

import numpy as np

from benchmarks import ours, peers
from benchmarks.pairs import repeats, sample
from benchmarks.shapes import QWEN, inputs

LENGTHS = (1, 4, 16, 64, 256, 1024, 2048)
SEQUENCES = (1, 2, 4, 8, 16, 32)
MAKERS = {"onnxruntime": peers.ort_delta, "ggml": peers.ggml_delta, "ik": peers.ik_delta, "torch": peers.torch_delta}


def median_time(call, samples=7):
    n = repeats(call, 1e-3)
    return statistics.median(sample(call, n) for _ in range(samples))


def measure():
    """{"prompt": {implementation: [(tokens, seconds a token)]}, "decode": {...: [(sequences, seconds a step)]}}, absent
    peers left out.  One thread."""
    curves = {"prompt": {"gdn": []}, "decode": {"gdn": []}}
    for n in LENGTHS:
        curves["prompt"]["gdn"].append((n, median_time(ours.prefill(QWEN, n)) / n))
    for n in SEQUENCES:
        curves["decode"]["gdn"].append((n, median_time(ours.decode_batch(QWEN, n))))
    for name, make in MAKERS.items():
        try:
            curves["prompt"][name] = [(n, median_time(make(QWEN, inputs(QWEN, n))[0], 3) / n) for n in LENGTHS]
            kept = {"in_place": True} if name == "onnxruntime" else {}
            curves["decode"][name] = [(n, median_time(make(QWEN, inputs(QWEN, 1, n), **kept)[0], 3)) for n in SEQUENCES]
        except ImportError:
            curves["prompt"].pop(name, None)
    return curves


def pyplot():
    """matplotlib's, set up so that the same numbers give the same file."""
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "gdn", "svg.fonttype": "none"})
    from matplotlib import pyplot
    return pyplot


def write_svg(figure, path):
    """For the documents: coordinates to a tenth of a point, no date."""
    figure.savefig(path, metadata={"Date": None})
    path.write_text(re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", path.read_text()))


def draw(curves, folder, machine):
    """prompt.svg and decode.svg in folder."""
    plot = pyplot()
    for key, x_label, y_label, title in (
            ("prompt", "prompt length, tokens", "microseconds a token", "Prefill, one layer"),
            ("decode", "sequences", "microseconds a step", "Decode, one layer")):
        figure, axes = plot.subplots(figsize=(7, 4.5), layout="constrained")
        for name, points in curves[key].items():
            x, y = np.array(points).T
            axes.plot(x, y * 1e6, marker="o", label=name, linewidth=2.2 if name == "gdn" else 1.2)
        axes.set(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label,
                 title=f"{title} ({QWEN.H_k}/{QWEN.H_v} heads of {QWEN.S_k}), one thread\n{machine}")
        ticks = LENGTHS if key == "prompt" else SEQUENCES
        axes.set_xticks(ticks, labels=map(str, ticks))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
        write_svg(figure, folder / f"{key}.svg")
        plot.close(figure)
