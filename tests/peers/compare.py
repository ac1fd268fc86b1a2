"""What the peer tests share: inputs, and ggml's memory as gdn sees it."""

import numpy as np
from helpers import unit

import gdn


def shared(t):
    """The ggml tensor as a gdn.Tensor over the same bytes."""
    return gdn.Tensor(t.address, t.ne, t.nb, owner=t.ctx)


def numbers(seed, n_seqs, n_tokens, H_k, H_v, S, kda=False):
    """q, k, v, g, beta, state in numpy order; g and beta with a last axis, as ggml keeps them."""
    rng = np.random.default_rng(seed)
    q, k = (unit(rng, (n_seqs, n_tokens, H_k, S)) for _ in range(2))
    v = rng.standard_normal((n_seqs, n_tokens, H_v, S))
    g = -np.exp(rng.uniform(-7, 1, (n_seqs, n_tokens, H_v, S if kda else 1)))
    beta = rng.uniform(0.01, 0.99, (n_seqs, n_tokens, H_v, 1))
    return q, k, v, g, beta, rng.standard_normal((n_seqs, H_v, S, S))
