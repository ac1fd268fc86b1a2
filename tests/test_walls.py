"""Nothing right before or right behind an array is touched: run as a program, which a touch of a protected page ends."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import Carved, assert_close, case, random_layout
from test_conv import make
from test_levels import LEVELS, runs_here

import gdn

TOKENS = (1, 3, 9, 17, 33)
LAYOUTS = [("plain", "plain"), ("plain", "turned"), ("turned", "plain"), ("any", "any")]        # of rows, of states


class Walls:
    """Carves arrays on one side of a wall, remembers outputs and what they must hold."""

    def __init__(self, wall, rows, states):
        self.rng, self.outputs = np.random.default_rng(0), []
        self.wall, self.layouts = wall, {"row": rows, "state": states}

    def carve(self, kind, values=None, shape=None):
        n = len(np.shape(values) if shape is None else shape)
        layout = random_layout(self.rng, n, True) if self.layouts[kind] == "any" else {}
        if self.layouts[kind] == "turned":
            layout["order"] = [*range(n)[:-2], *range(n)[:-3:-1]]
        return Carved(values, shape, **layout, wall=self.wall)

    def row(self, values):
        return None if values is None else self.carve("row", values).array

    def out(self, expected, kind="row"):
        self.outputs.append((self.carve(kind, shape=expected.shape), expected))
        return self.outputs[-1][0].array

    def check(self):
        for x, expected in self.outputs:
            assert x.intact()
            assert_close(x.array, expected, "output")


def on_states(w, op, inputs, state, keep, **options):
    """A call that keeps its states in new memory, in place, or two of every sequence."""
    options |= {"n_threads": 1, "snapshots": 2 if keep == "slots" else None}
    out, new = op(*inputs, state, **options)
    target = w.out(new, "state")
    start = target if keep == "in place" else w.carve("state", state).array
    start[...] = state
    op(*(w.row(x) for x in inputs), start, out=w.out(out), state_out=target, **options)


def delta(w, keep, n_tokens, mode, per_channel, sizes):
    *inputs, state = case(w.rng, 2, n_tokens, 1, 2, *sizes, "-1e-3", per_channel).values()
    on_states(w, gdn.gated_delta_net, inputs, state, keep, head_map="tiled", mode=mode)


def conv(w, keep, n_tokens, width, n_channels, with_bias):
    x, weight, bias, state = make(w.rng, 2, n_tokens, n_channels, width)
    on_states(w, gdn.causal_conv1d, [x, weight, bias if with_bias else None], state, keep)


def row_wise(w, op, *arrays, **options):
    out = op(*arrays, **options)
    op(*(w.row(x) for x in arrays), **options, out=w.out(out), n_threads=1)


def norms(w, n):
    x, gate, weight = (w.rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, n), (2, 3, n), n))
    row_wise(w, gdn.l2_norm, x)
    row_wise(w, gdn.rms_norm_gated, x, gate, weight)


def gate(w, n, channels, form):
    a, A, bias = (w.rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, n, *channels), n, (n, *channels)))
    row_wise(w, gdn.decay_gate, a, -np.abs(A), bias, gate=form, lower_bound=None if form == "softplus" else -5.0)


def solve(w, n, m, lower):
    a, b = (w.rng.random(shape, np.float32) + 4 * np.eye(*shape[1:], dtype=np.float32) for shape in ((2, n, n), (2, n, m)))
    row_wise(w, gdn.solve_tri, a, b, lower=lower)


KEEP, SIZES = ("new", "in place", "slots"), [(16, 16), (20, 33), (64, 40), (128, 128)]
LENGTHS = (1, 3, 16, 37, 64)
CALLS = {delta: (KEEP, TOKENS, ("recurrent", "chunked"), (False, True), SIZES),
         conv: (KEEP, TOKENS, (1, 4, 6), (16, 37), (False, True)),
         norms: (LENGTHS,),
         gate: (LENGTHS, [(), (16,), (20,)], ("softplus", "bounded", "clamped")),
         solve: (LENGTHS, LENGTHS, (False, True))}


def main():
    """Every third of the calls for each layout and wall, another third for the next."""
    for i, (layouts, wall) in enumerate(itertools.product(LAYOUTS, ("before", "behind"))):
        for call, factors in CALLS.items():
            for arguments in itertools.islice(itertools.product(*factors), i % 3, None, 3):
                print(wall, layouts, call.__name__, arguments, flush=True)
                walls = Walls(wall, *layouts)
                call(walls, *arguments)
                walls.check()
    print("done")


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_beyond_an_array_is_touched(level):
    if not runs_here(level):
        pytest.skip(f"this machine does not run {level}")             # no installation would help: CI may skip it too
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True,
                          env={**os.environ, "GDN_LEVEL": level, "PYTHONPATH": os.pathsep.join(sys.path)})
    last = done.stdout.splitlines()[-1:]
    assert (done.returncode, last) == (0, ["done"]), done.stderr


if __name__ == "__main__":
    main()
