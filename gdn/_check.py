"""`python -m gdn check`: the kernels of this build, on this machine, against gdn.reference.

Error is max|x - ref| / max|ref| over outputs and over final states, for unit-norm keys; the bound is BOUND.
"""

import itertools
import sys

import numpy as np

import gdn
from gdn import reference

BOUND = 1e-5
TOKENS = (0, 1, 2, 15, 16, 17, 33, 64, 65, 130)
HEADS = ((1, 1), (2, 4), (2, 6))
SIZES = ((1, 1), (3, 5), (16, 16), (20, 33), (64, 64), (96, 192), (128, 128))
GATES = ("0", "-3e-4", "-1e-3", "-5", "-89", "-2661", "mixed", "-1e8 once", "-inf once")
WAYS = ("chunked", "recurrent", "in place", "packed")


def grid(full):
    """Cases (n_tokens, heads, sizes, gate, per_channel, way): all of them, or a few hundred that meet every pair
    of sizes, gate, gate kind and way."""
    if full:
        yield from itertools.product(TOKENS, HEADS, SIZES, GATES, (False, True), WAYS)
        return
    for i, case in enumerate(itertools.product(SIZES, GATES, (False, True), WAYS)):
        yield TOKENS[i * 7 % len(TOKENS)], HEADS[i % len(HEADS)], *case


def draw(rng, n_tokens, heads, sizes, gate, per_channel):
    """Random arguments of one case for two sequences, state last; keys and queries have unit norm."""
    (H_k, H_v), (S_k, S_v), n = heads, sizes, 2
    q, k = (reference.l2_norm(rng.standard_normal((n, n_tokens, H_k, S_k)), 0) for _ in range(2))
    v, state = rng.standard_normal((n, n_tokens, H_v, S_v)), rng.standard_normal((n, H_v, S_v, S_k))
    shape = (n, n_tokens, H_v, S_k) if per_channel else (n, n_tokens, H_v)
    if gate == "mixed":
        g = rng.choice([0, -1e-3, -0.1, -2, -30, -2661], shape)
    elif gate.endswith("once"):
        g = np.full(shape, -0.1)
        g[:, n_tokens // 2:n_tokens // 2 + 1] = float(gate.split()[0])
    else:
        g = np.full(shape, float(gate))
    beta = rng.uniform(0, 1, (n, n_tokens, H_v))
    return [x.astype(np.float32) for x in (q, k, v, g, beta, state)]


def compute(way, q, k, v, g, beta, state, head_map):
    """(out, state) from the kernels, by one of WAYS."""
    if way in ("chunked", "recurrent"):
        return gdn.gated_delta_net(q, k, v, g, beta, state, head_map=head_map, mode=way)
    if way == "in place":                              # key-major rows of a larger cache, in another order
        cache = np.full((5, *state.shape[1:-2], state.shape[-1], state.shape[-2]), np.nan, np.float32).swapaxes(-1, -2)
        cache[[3, 1]] = state
        out = gdn.gated_delta_net_inplace(q, k, v, g, beta, cache, [3, 1], head_map=head_map)
        return out, cache[[3, 1]]
    n, n_tokens = v.shape[:2]
    packed = [x.reshape(1, n * n_tokens, *x.shape[2:]) for x in (q, k, v, g, beta)]
    out, state = gdn.gated_delta_net(*packed, state, head_map=head_map, cu_seqlens=np.arange(n + 1) * n_tokens)
    return out.reshape(v.shape), state


def miss(x, ref):
    """Relative error of x; infinite where x is not finite or has another shape."""
    if x.shape != ref.shape or not np.isfinite(x).all():
        return np.inf
    return np.abs(x - ref).max(initial=0) / max(np.abs(ref).max(initial=0), 1e-30)


def delta_cases(full):
    rng = np.random.default_rng(2412)
    for i, (n_tokens, heads, sizes, gate, per_channel, way) in enumerate(grid(full)):
        head_map = ("tiled", "interleaved")[i % 2]
        arrays = draw(rng, n_tokens, heads, sizes, gate, per_channel)
        expected = reference.recurrent(*arrays, head_map=head_map)
        error = max(miss(x, ref) for x, ref in zip(compute(way, *arrays, head_map), expected, strict=True))
        yield (f"{'KDA' if per_channel else 'GDN'} {way}, {n_tokens} tokens, heads {heads}, sizes {sizes}, g {gate}, "
               f"{head_map}"), error


def other_cases():
    """The operations around the delta rule, at a few odd sizes."""
    rng = np.random.default_rng(6464)
    for size in (1, 7, 33, 128, 260):
        x, y, z = (rng.standard_normal((2, 9, 3, size)).astype(np.float32) for _ in range(3))
        w, A = y[0, 0, 0], -np.exp(y[0, 0, :, 0])
        norm = x / np.sqrt((x.astype(float)**2).mean(-1, keepdims=True) + 1e-6) * w
        yield f"l2_norm {size}", miss(gdn.l2_norm(x), reference.l2_norm(x))
        yield f"rms_norm_gated {size}", miss(gdn.rms_norm_gated(x, z, w), norm * z * reference.sigmoid(z))
        yield f"decay_gate {size}", miss(gdn.decay_gate(x, A, y[0, 0]),
                                         reference.softplus(x + y[0, 0].astype(float)) * A[:, None])
        yield f"causal_conv1d {size}", conv_miss(x[:, :, 0], y[0, :4, 0].T, z[:, :3, 0].swapaxes(1, 2))
        a = np.tril(rng.standard_normal((2, size, size)) / size, -1).astype(np.float32)
        b = rng.standard_normal((2, size, 5)).astype(np.float32)
        yield f"solve_tri {size}", miss(gdn.solve_tri(a, b, unit=True),
                                        np.linalg.solve(np.eye(size) + a.astype(float), b))


def conv_miss(x, weight, state):
    n_tokens, past = x.shape[1], np.concatenate([state.swapaxes(1, 2), x], 1).astype(float)
    y = sum(past[:, i:i + n_tokens] * weight[:, i] for i in range(4))
    out, window = gdn.causal_conv1d(x, weight, None, state)
    return max(miss(out, y * reference.sigmoid(y)), miss(window, past[:, -3:].swapaxes(1, 2)))


def run(full=False):
    """Check everything, showing progress; 0 when all is within BOUND, 1 after a miss."""
    others = list(other_cases())
    total = sum(1 for _ in grid(full)) + len(others)
    worst, misses, live = ("", 0.0), 0, sys.stdout.isatty()
    config = gdn.show_config("dicts")
    print(f"gdn {config['version']}, level {config['level']}, {config['threads']} threads: {total} cases, "
          f"bound {BOUND:g}", flush=True)
    print("Fine here and wrong in your model?  g is the natural log of the decay: if all of a call's g are in (0, 1], they are "
          "most likely decays, and np.log(g) is meant.")
    for done, (name, error) in enumerate(itertools.chain(delta_cases(full), others), 1):
        if error > worst[1]:
            worst = name, error
        if not error <= BOUND:
            misses += 1
            print(f"MISS {error:.1e}  {name}", flush=True)
        if done == total or done % (10 if live else max(1, total // 10)) == 0:
            print(f"{done:6} of {total}, worst error {worst[1]:.1e}", end="\r" if live else "\n", flush=True)
    print(f"{misses} of {total} cases missed the bound; worst error {worst[1]:.1e} ({worst[0]})")
    return 1 if misses else 0
