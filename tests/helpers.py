"""What the tests share: the error measure, memory carved from NaN-filled arenas, random cases of the delta rule."""

import ctypes
import importlib
import itertools
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

import gdn
from gdn import reference

DATA = Path(__file__).parent / "data"
BOUND = 1e-5
LIBC = ctypes.CDLL(None)
CANARY = np.uint32(0x7FC0DEAD)        # a NaN whose payload no arithmetic produces


def missing(what):
    """Something a test needs is not installed: a skip that says so; where CI is set, which installs all, a failure."""
    if os.environ.get("CI"):
        pytest.fail(f"CI must have it installed: {what}")
    pytest.skip(str(what), allow_module_level=True)


def optional(module):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing(error)


def error(x, ref):
    """max|x - ref| / max(max|ref|, 1e-30); infinite if x is not finite where ref is."""
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    assert x.shape == ref.shape, f"shape {x.shape}, expected {ref.shape}"
    assert np.isfinite(ref).all(), "the reference itself is not finite"
    if x.size == 0:
        return 0.0
    if not np.isfinite(x).all():
        return np.inf
    return np.abs(x - ref).max() / max(np.abs(ref).max(), 1e-30)


def assert_close(x, ref, what, bound=BOUND):
    e = error(x, ref)
    assert e <= bound, f"{what}: error {e:.3g} > {bound:g}"


def bits(x):
    """The bit patterns of a float32 array, for comparisons that tell NaN payloads and signed zeros apart."""
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def same_bits(a, b):
    return np.array_equal(bits(a), bits(b))


def walled(n, behind):
    """n words that end where a protected page begins, or begin where one ends: a touch of it ends the process."""
    page = mmap.PAGESIZE
    n_pages = -(-4 * n // page)
    memory = mmap.mmap(-1, (n_pages + 2) * page)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in (0, n_pages + 1):
        assert LIBC.mprotect(ctypes.c_void_p(first + at * page), page, 0) == 0
    return np.frombuffer(memory, np.uint32, n, (n_pages + 1) * page - 4 * n if behind else page)


class Carved:
    """A float32 array of any stride order, carved from memory that is NaN everywhere else.

    order   axes from the slowest to the fastest in memory; default C order
    gaps    elements left free between neighbours of every axis
    flips   axes that run backwards
    zeros   axes broadcast with stride 0 (inputs only: values must be constant along them)
    lead    elements of canary before, and at least as many behind
    wall    "before" or "behind": instead, memory that nobody may touch right before the first element or right behind
            the last
    """

    def __init__(self, values=None, shape=None, order=None, gaps=(), flips=(), zeros=(), lead=19, wall=None):
        shape = tuple(np.shape(values) if shape is None else shape)
        strides, reach = [0] * len(shape), 1
        for axis in reversed(range(len(shape)) if order is None else order):
            if axis not in zeros:
                strides[axis] = reach + (gaps[axis] if axis < len(gaps) else 0)
                reach = strides[axis] * max(shape[axis], 1)
        span = 1 + sum(s * max(n - 1, 0) for s, n in zip(strides, shape, strict=True))
        start = 0 if wall else lead
        for axis in flips:
            start += strides[axis] * max(shape[axis] - 1, 0)
            strides[axis] = -strides[axis]
        self.words = walled(span, wall == "behind") if wall else np.empty(lead + reach + lead + 64, np.uint32)
        self.words[...] = CANARY
        self.array = np.ndarray(shape, np.float32, self.words, 4 * start, [4 * s for s in strides])
        self.free = np.ones(self.words.shape, bool)
        free = np.ndarray(shape, bool, self.free, start, strides)
        if 0 not in shape:
            free[...] = False
        if values is not None and 0 not in shape:
            self.array[...] = values

    def intact(self):
        """Whether every word that is not the array's still holds the canary."""
        return bool((self.words[self.free] == CANARY).all())


def random_layout(rng, ndim, output=False):
    """Keywords of Carved: any order, gaps and directions."""
    return {
        "order": [int(i) for i in rng.permutation(ndim)],
        "gaps": [int(i) for i in rng.integers(0, 4, ndim) * (rng.random(ndim) < 0.4)],
        "flips": [i for i in range(ndim) if rng.random() < 0.2],
        "zeros": [] if output else [i for i in range(ndim) if rng.random() < 0.05],
        "lead": int(rng.integers(1, 40)),
    }


def broadcastable(name, values, layout):
    """An argument's values made constant along the layout's broadcast axes, q and k of norm 1 as before: with longer keys a
    state may grow without bound, and its errors with it."""
    for axis in layout.get("zeros", ()):
        n = values.shape[axis]
        if n and name in ("q", "k") and axis == values.ndim - 1:
            values = np.copysign(np.float32(n**-0.5), values)
        if n:
            values = np.repeat(values.take([0], axis), n, axis)
    return values


# ---- cases -----------------------------------------------------------------------------------------------------

GATES = ("zero", "-3e-4", "-1e-3", "-5", "-89", "-100", "-2661", "one -1e8", "mix", "one -inf")


def gate(rng, kind, shape):
    """Log decays of the kind named; "one ..." is at one token of every head (and channel)."""
    g = np.full(shape, -0.1, np.float32)
    if kind == "zero":
        g[...] = 0
    elif kind == "mix":
        g = -np.exp(rng.uniform(np.log(1e-4), np.log(1e8), shape)).astype(np.float32)
        g[rng.random(shape) < 0.5] = -1e-3
        g[rng.random(shape) < 0.02] = -np.inf
        g[rng.random(shape) < 0.1] = 0
    elif kind.startswith("one "):
        if shape[1]:
            token = rng.integers(0, shape[1], shape[:1] + (1,) + shape[2:])
            np.put_along_axis(g, token, np.float32(float(kind[4:])), 1)
    else:
        g[...] = float(kind)
    return g


def unit(rng, shape):
    x = rng.standard_normal(shape)
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def case(rng, n_seqs=1, n_tokens=33, H_k=2, H_v=2, S_k=16, S_v=16, gates="mix", per_channel=False, state=True):
    """Inputs of one call, contiguous: unit-norm q and k, beta in (0, 1], a state that is not zero."""
    rows = (n_seqs, n_tokens)
    return {
        "q": unit(rng, (*rows, H_k, S_k)),
        "k": unit(rng, (*rows, H_k, S_k)),
        "v": rng.standard_normal((*rows, H_v, S_v)).astype(np.float32),
        "g": gate(rng, gates, (*rows, H_v, S_k) if per_channel else (*rows, H_v)),
        "beta": (1 - rng.random((*rows, H_v))).astype(np.float32),
        "state": rng.standard_normal((n_seqs, H_v, S_v, S_k)).astype(np.float32) if state else None,
    }


def head_map(c, i=0):
    """A legal head_map: None where both agree, else one of the two, chosen by i."""
    if c["q"].shape[2] == c["v"].shape[2]:
        return None
    return ("tiled", "interleaved")[i % 2]


def truth(c, head_map=None, **options):
    """(out, state, states after every token) of gdn.reference's recurrence."""
    states = []
    out, state = reference.recurrent(**c, head_map=head_map or "tiled", states=states, **options)
    return out, state, states


def snapshot_truth(c, states, K):
    """Snapshots (K, n_seqs, H_v, S_v, S_k) from truth's states: slots that do not exist are zero."""
    n_seqs, n_tokens, H_v, S_v = c["v"].shape
    S_k = c["q"].shape[-1]
    slots = np.zeros((K, n_seqs, H_v, S_v, S_k))
    for s in range(min(K, n_tokens)):
        slots[s] = states[n_tokens - 1 - s]
    if n_tokens == 0 and c["state"] is not None:
        slots[0] = c["state"]
    return slots


def sequence(c, start, stop, i=slice(None)):
    """Tokens start..stop of sequences i of a case."""
    part = {name: c[name][i, start:stop] for name in ("q", "k", "v", "g", "beta")}
    return {**part, "state": None if c["state"] is None else c["state"][i]}


def pack(c, cu):
    """Sequences packed one behind the other: token cu[i] + t of the packed case is token t of sequence i."""
    lengths = np.diff(cu)
    return {name: np.concatenate([c[name][i, :n] for i, n in enumerate(lengths)])[None]
            for name in ("q", "k", "v", "g", "beta")}


def run(c, **options):
    return gdn.gated_delta_net(**c, **options)


MODES = ("recurrent", "chunked", "auto")


def covering(factors, seed, strength=2):
    """Rows in which every combination of `strength` factors' values occurs: greedy, the same for the same seed."""
    rng = np.random.default_rng(seed)
    groups = list(itertools.combinations(range(len(factors)), strength))
    left = {g: set(itertools.product(*(range(len(factors[i])) for i in g))) for g in groups}
    rows = []
    while any(left.values()):
        group = max(groups, key=lambda g: len(left[g]))
        best, best_gain = None, -1
        wanted = sorted(left[group])
        for _ in range(12):
            row = [int(rng.integers(len(f))) for f in factors]
            for i, value in zip(group, wanted[rng.integers(len(wanted))], strict=True):
                row[i] = value
            gain = sum(tuple(row[i] for i in g) in left[g] for g in groups)
            if gain > best_gain:
                best, best_gain = row, gain
        for g in groups:
            left[g].discard(tuple(best[i] for i in g))
        rows.append(tuple(f[i] for f, i in zip(factors, best, strict=True)))
    return rows
