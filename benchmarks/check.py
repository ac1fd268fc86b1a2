"""The answer before the time: a call's output and state against the float64 reference, one head at a time."""

import numpy as np

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


def check_result(shape, data, out, state, head_map="tiled", bound=BOUND, slots=1):
    """out and states of the first and the last head against the recurrence; state None: out alone.

    With slots > 1 state has a leading axis of them, the newest first.
    """
    for h in {0, shape.H_v - 1}:
        states = [] if slots > 1 else None
        ref_out, ref_state = reference.recurrent(*one_head(data, shape.H_k, h, head_map), states=states)
        expect(f"{shape.name}: output of head {h}", out[:, :, h:h + 1], ref_out, bound)
        if slots > 1:
            expect(f"{shape.name}: snapshots of head {h}", state[:, :, h:h + 1], states[:-slots - 1:-1], bound)
        elif state is not None:
            expect(f"{shape.name}: state of head {h}", state[:, h:h + 1], ref_state, bound)


def check_conv(x, weight, state, out, new_state, bound=BOUND):
    """Convolution, SiLU and the carried state."""
    width, n_tokens = weight.shape[1], x.shape[1]
    full = np.concatenate([state.swapaxes(1, 2), x], 1, dtype=np.float64)
    ref = sum(full[:, i:i + n_tokens] * weight[:, i] for i in range(width))
    expect("convolution", out, ref * reference.sigmoid(ref), bound)
    expect("convolution state", new_state, full[:, n_tokens:].swapaxes(1, 2), bound)
