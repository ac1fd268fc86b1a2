"""The first files of tests/corpus, from which the fuzzers of `make fuzz-bytes` start: `python tests/fuzz_seeds.py FOLDER`."""

import sys
from pathlib import Path

import numpy as np
from gguf_tools import FORMS, KIMI, KIMI_META, META, random_tensors, write

import gdn

EXTENTS = dict(n_layers=2, H_k=1, H_v=2, S_k=4, S_v=4, conv_channels=5, conv_width=3)     # those of tests/c/fuzz_bytes.c


def used_ring(form, **options):
    """A ring in which one sequence has been rolled back, one is in a step, one was copied; its memory and the ring."""
    buffer = np.zeros(gdn.StateRing.nbytes_for(3, 2, form=form, **options), np.uint8)
    ring = gdn.StateRing.create(3, 2, form=form, buffer=buffer, **options)
    for seq_id in (5, 6):
        ring.acquire(seq_id)
        for n in (4, 1, 2):
            ring.begin([seq_id], [n]).commit(written=True)
    ring.rollback(5, 1)
    ring.copy(5, 8)
    return buffer, ring


def main(folder):
    folder = Path(folder)
    for name in ("ring", "saved", "gguf"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for form in ("planes", "log"):
        for dtype in ("f32", "bf16"):
            small = dict(n_layers=1, H_k=1, H_v=2, S_k=2, S_v=2, conv_channels=3, conv_width=2, dtype=dtype)
            buffer, ring = used_ring(form, **small, log_capacity=5 if form == "log" else None)
            other = used_ring(form, dtype=dtype, **EXTENTS)[1]
            (folder / "ring" / f"{form}-{dtype}").write_bytes(buffer.tobytes())
            for depth in (True, False):
                if depth or form == "planes":
                    (folder / "saved" / f"{form}-{dtype}-{depth}").write_bytes(other.save(5, depth=depth))
            step = ring.begin([6], [3])
            (folder / "ring" / f"{form}-{dtype}-step").write_bytes(buffer.tobytes())
            step.abort()
        scribbles = np.random.default_rng(1).integers(0, 2**32, 32, np.uint32)
        (folder / "ring" / f"{form}-scribbled").write_bytes(buffer.tobytes() + scribbles.tobytes())
    rng = np.random.default_rng(2)
    for arch, shapes, meta in (("qwen35", FORMS["qwen35"], META), ("qwen3next", FORMS["qwen3next"], META),
                               ("kimi-linear", KIMI, KIMI_META)):
        write(folder / "gguf" / arch, arch, meta, random_tensors(shapes, rng))


if __name__ == "__main__":
    main(sys.argv[1])
