"""The answer before the time: a call's output and state against the float64 reference, one head at a time."""

import numpy as np

import gdn
from benchmarks.shapes import inputs
from gdn import reference

BOUND = 1e-5


def error(x, ref):
    return float(np.abs(x - ref).max(initial=0) / max(np.abs(ref).max(initial=0), 1e-30))


def expect(what, x, ref, bound=BOUND):
    worst = error(np.asarray(x, np.float64), np.asarray(ref, np.float64))
    if not worst <= bound:
        raise AssertionError(f"{what} is off by {worst:.2e} of its largest value, more than {bound:.0e}")


def one_head(data, H_k, h, head_map):
    """The data of value head h alone."""
    q, k, v, g, beta, state = data
    key = reference.head_index(H_k, v.shape[2], head_map)[h]
    return (q[:, :, key:key + 1], k[:, :, key:key + 1], v[:, :, h:h + 1], g[:, :, h:h + 1], beta[:, :, h:h + 1],
            state[:, h:h + 1])


def check_result(shape, data, out, state, head_map="tiled", bound=BOUND):
    """out and final state of the first and the last head against the recurrence."""
    for h in {0, shape.H_v - 1}:
        ref_out, ref_state = reference.recurrent(*one_head(data, shape.H_k, h, head_map))
        expect(f"{shape.name}: output of head {h}", out[:, :, h:h + 1], ref_out, bound)
        expect(f"{shape.name}: state of head {h}", state[:, h:h + 1], ref_state, bound)


def check_call(shape, n_tokens, *, snapshots=None, head_map="tiled", n_threads=1):
    data = inputs(shape, n_tokens)
    out, state = gdn.gated_delta_net(*data, head_map=head_map, n_threads=n_threads, snapshots=snapshots)
    check_result(shape, data, out, state if snapshots is None else state[0], head_map)
