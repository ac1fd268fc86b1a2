"""`python -m gdn check --types`: how far states of each type drift from float64 while thousands of tokens are decoded.

Error is max|out - ref| over the heads of a token, relative to the largest |ref| of all tokens; the keys have unit norm, one
token is a call.  Only states are narrow: q, k, v, g, beta and out are float32, and so is a log.
"""

import numpy as np

import gdn
from gdn import reference

GATES = (-1e-4, -1e-3, -1e-2, -1e-1, -1.0)
TYPES = (("f32", "nearest"), ("bf16", "nearest"), ("bf16", "stochastic"), ("f16", "nearest"), ("f16", "stochastic"))
FORMS = ("planes", "log")
HEADS, SIZE = 2, 64


def inputs(n_tokens):
    """q, k, v, g, beta of one sequence a gate."""
    rng = np.random.default_rng(4096)
    n = len(GATES)
    q, k = (reference.l2_norm(rng.standard_normal((n, n_tokens, HEADS, SIZE)), 0) for _ in range(2))
    v, beta = rng.standard_normal((n, n_tokens, HEADS, SIZE)), rng.uniform(0, 1, (n, n_tokens, HEADS))
    g = np.broadcast_to(np.reshape(GATES, (n, 1, 1)), beta.shape)
    return [x.astype(np.float32) for x in (q, k, v, g, beta)]


def decode(arrays, dtype, rounding, form):
    """out of every token, each a step of a ring of that type and form."""
    n, n_tokens = arrays[0].shape[:2]
    out = np.empty_like(arrays[2])
    ring = gdn.StateRing.create(n, 8 if form == "log" else 0, n_layers=1, H_k=HEADS, H_v=HEADS, S_k=SIZE, S_v=SIZE, form=form,
                                dtype=dtype)
    for i in range(n):
        ring.acquire(i)
    log = ring.log(0) if form == "log" else None
    for t in range(n_tokens):
        seed = {} if rounding == "nearest" else {"seed": t}
        with ring.begin(range(n), [1] * n) as step:
            gdn.gated_delta_net_inplace(
                *(x[:, t:t + 1] for x in arrays), step.ssm(0), step.rows_in, step.rows_out, log=log, log_in=step.log_in,
                log_out=step.log_out, checkpoints=step.checkpoints, out=out[:, t:t + 1], rounding=rounding, **seed)
    return out


def measure(n_tokens=4096):
    """{(dtype, rounding, form): errors (gates, tokens)}."""
    arrays = inputs(n_tokens)
    ref, _ = reference.recurrent(*arrays)
    largest = np.abs(ref).max((1, 2, 3))[:, None]
    return {(*kind, form): np.abs(decode(arrays, *kind, form) - ref).max((2, 3)) / largest for kind in TYPES for form in FORMS}


def run():
    """Print the table: the largest error of all tokens."""
    print("largest error of 4096 tokens, single steps, by the gate's log decay")
    print(f"{'state':6}{'rounding':12}{'form':8}" + "".join(f"{g:>10g}" for g in GATES))
    for (dtype, rounding, form), errors in measure().items():
        print(f"{dtype:6}{rounding:12}{form:8}" + "".join(f"{e:10.1e}" for e in errors.max(1)), flush=True)
    return 0
