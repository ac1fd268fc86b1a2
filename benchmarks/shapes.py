"""Head shapes of released models, and the inputs that every implementation is measured on."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shape:
    """One layer's heads.  ``kda``: the gate has one value per key channel."""

    name: str
    H_k: int
    H_v: int
    S_k: int
    S_v: int
    kda: bool = False
    conv_width: int = 4

    @property
    def conv_channels(self):
        return 2 * self.H_k * self.S_k + self.H_v * self.S_v

    @property
    def state_bytes(self):
        return 4 * self.H_v * self.S_k * self.S_v

    def flops(self, n_tokens):
        """6 S_k S_v per token and value head: three products with the state (S k, S q, k d)."""
        return 6.0 * self.S_k * self.S_v * self.H_v * n_tokens


SHAPES = {s.name: s for s in (
    Shape("qwen3-next-80b", 16, 32, 128, 128),
    Shape("qwen3.5-0.8b", 16, 16, 128, 128),
    Shape("qwen3.5-27b", 16, 48, 128, 128),
    Shape("kimi-linear-48b", 32, 32, 128, 128, kda=True),
    Shape("olmo-hybrid-7b", 30, 30, 96, 192),
)}
QWEN = SHAPES["qwen3-next-80b"]
KIMI = SHAPES["kimi-linear-48b"]


def aligned(shape, dtype=np.float32):
    """An array on a 64-byte address, page-touched."""
    n = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(n + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + n].view(dtype).reshape(shape)


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True))


def inputs(shape, n_tokens, n_seqs=1, seed=0, g=None):
    """q, k, v, g, beta, state in numpy order: unit keys and queries, gates -1e-3 to -2 (or in g)."""
    rng = np.random.default_rng(seed)

    def normal(*extents):
        a = aligned(extents)
        rng.standard_normal(out=a, dtype=np.float32)
        return a

    q, k = (normal(n_seqs, n_tokens, shape.H_k, shape.S_k) for _ in range(2))
    q[:], k[:] = unit(q), unit(k)
    v = normal(n_seqs, n_tokens, shape.H_v, shape.S_v)
    gate = aligned((n_seqs, n_tokens, shape.H_v) + ((shape.S_k,) if shape.kda else ()))
    gate[:] = -np.exp(rng.uniform(np.log(1e-3), np.log(2), gate.shape)) if g is None else rng.uniform(*g, gate.shape)
    beta = aligned((n_seqs, n_tokens, shape.H_v))
    beta[:] = rng.uniform(0.05, 0.95, beta.shape)
    state = normal(n_seqs, shape.H_v, shape.S_v, shape.S_k)
    state *= 0.1
    return q, k, v, gate, beta, state


def conv_inputs(n_tokens, channels=8192, width=4, n_seqs=1, seed=0):
    """x (n_seqs, n_tokens, channels), weight (channels, width), state (n_seqs, channels, width-1)."""
    rng = np.random.default_rng(seed)
    arrays = [aligned(s) for s in ((n_seqs, n_tokens, channels), (channels, width), (n_seqs, channels, width - 1))]
    for a in arrays:
        rng.standard_normal(out=a, dtype=np.float32)
    return arrays
