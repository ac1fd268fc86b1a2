"""``python -m benchmarks.drift``: docs/drift.svg, errors of the states' types over 4096 decoded tokens (`gdn._drift`)."""

from pathlib import Path

import numpy as np

from benchmarks.plots import pyplot, write_svg
from gdn._drift import GATES, TYPES, measure

FILE = Path(__file__).parents[1] / "docs" / "drift.svg"
BLOCK = 64              # tokens whose largest error is one point


def draw(errors, file=FILE):
    figure, axes = pyplot().subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for ax, form in zip(axes, ("planes", "log"), strict=True):
        for dtype, rounding in TYPES:
            y = errors[dtype, rounding, form][GATES.index(-1e-3)].reshape(-1, BLOCK).max(1)
            ax.plot(np.arange(1, len(y) + 1) * BLOCK, y, label=dtype if dtype == "f32" else f"{dtype}, {rounding}",
                    linestyle="--" if rounding == "stochastic" else "-")
        ax.set(yscale="log", xlabel="tokens decoded", title=f"form {form!r}")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("largest error of 64 tokens")
    axes[0].legend(fontsize="small")
    write_svg(figure, file)


if __name__ == "__main__":
    draw(measure())
