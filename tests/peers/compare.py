"""What the peer tests share: inputs in a ggml arena, the same memory for gdn, the error measure."""

import numpy as np

import gdn

BOUND = 1e-5


def shared(t):
    """The ggml tensor as a gdn.Tensor over the same bytes."""
    return gdn.Tensor(t.address, t.ne, t.nb, owner=t.ctx)


def close(what, x, ref, bound=BOUND):
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    assert x.shape == ref.shape, f"{what}: shape {x.shape} against {ref.shape}"
    error = np.abs(x - ref).max(initial=0) / max(np.abs(ref).max(initial=0), 1e-30)
    assert error <= bound, f"{what} is off by {error:.2e}"


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True))


def numbers(seed, n_seqs, n_tokens, H_k, H_v, S, kda=False):
    """q, k, v, g, beta, state in numpy order; g and beta with a last axis, as ggml keeps them."""
    rng = np.random.default_rng(seed)
    q, k = (unit(rng.standard_normal((n_seqs, n_tokens, H_k, S))) for _ in range(2))
    v = rng.standard_normal((n_seqs, n_tokens, H_v, S))
    g = -np.exp(rng.uniform(-7, 1, (n_seqs, n_tokens, H_v, S if kda else 1)))
    beta = rng.uniform(0.01, 0.99, (n_seqs, n_tokens, H_v, 1))
    return q, k, v, g, beta, rng.standard_normal((n_seqs, H_v, S, S))
