"""ggml owns the state cache, gdn works on it in place.  Needs the wheel libggml-python.

1. llama.cpp's layout: one tensor [n_embd_s, mem_size * K] a layer for the recurrent states and one [n_embd_r, ...] for
   the convolution windows.  A sequence's cell c has K rollback groups, newest first: the state i tokens back is row
   i * mem_size + c.  What llama.cpp does in build_rs (gather, reset), the op, and the copy of every snapshot back into
   its group is one call here: rows_in names the rows to start from (-1 = zeros), rows_out the row of every snapshot.
   Rows are read as if before any is written, so cells may be swapped and forked freely.  A snapshot that does not
   exist, because the sequence has fewer tokens than K, leaves its row as it was (llama.cpp clamps, and copies an
   existing one there): after a call with n tokens at most n - 1 can be taken back.
2. ik_llama.cpp's layout: one row a slot, first the convolution window, then the recurrent state as [key][value]: the
   same memory seen through an offset, the row's pitch and swapped axes.
"""

import ctypes
import importlib.util
from pathlib import Path

import numpy as np

import gdn
from gdn import reference

H_K, H_V, S, WIDTH = 2, 4, 32, 4
CHANNELS = (2 * H_K + H_V) * S
N_EMBD_S, N_EMBD_R = S * S * H_V, (WIDTH - 1) * CHANNELS
rng = np.random.default_rng(0)
WEIGHT = rng.standard_normal((CHANNELS, WIDTH)).astype(np.float32) / 2


class Arena:
    """ggml's memory, through the few calls that this needs."""

    def __init__(self, nbytes):
        wheel = importlib.util.find_spec("libggml")
        if wheel is None:
            raise SystemExit("this example needs ggml: pip install libggml-python")
        folder = Path(wheel.origin).parent / "lib64"
        self.lib = ctypes.CDLL(str(folder / "libggml-base.so"))

        class Params(ctypes.Structure):
            _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]

        self.lib.ggml_init.restype = self.lib.ggml_new_tensor_2d.restype = ctypes.c_void_p
        self.lib.ggml_get_data.restype = ctypes.c_void_p
        self.lib.ggml_init.argtypes = [Params]
        self.lib.ggml_new_tensor_2d.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        self.lib.ggml_get_data.argtypes = self.lib.ggml_free.argtypes = [ctypes.c_void_p]
        self.context = self.lib.ggml_init(Params(nbytes, None, False))

    def __del__(self):
        if hasattr(self, "context"):
            self.lib.ggml_free(self.context)

    def new(self, ne0, ne1):
        """A float32 ggml tensor [ne0, ne1]; its memory as a gdn.Tensor that keeps the arena alive."""
        tensor = self.lib.ggml_new_tensor_2d(self.context, 0, ne0, ne1)
        return gdn.Tensor(self.lib.ggml_get_data(tensor), (ne0, ne1), owner=self)


def inputs(n_seqs, n_tokens):
    """Projections x (the convolution's input), g and beta."""
    x = rng.standard_normal((n_seqs, n_tokens, CHANNELS)).astype(np.float32)
    g = -rng.random((n_seqs, n_tokens, H_V), np.float32)
    return x, g, rng.random((n_seqs, n_tokens, H_V), np.float32)


def layer(x, g, beta, conv_cache, state_cache, rows_in, rows_out):
    """Convolution and delta rule, both caches updated in place."""
    y = gdn.causal_conv1d_inplace(x, WEIGHT, None, conv_cache, rows_in, rows_out)
    y = y.reshape(*x.shape[:2], -1, S)
    return gdn.gated_delta_net_inplace(y[:, :, :H_K], y[:, :, H_K:2 * H_K], y[:, :, 2 * H_K:], g, beta, state_cache,
                                       rows_in, rows_out, head_map="interleaved", qk_l2norm=True)


def truth(history):
    """Float64: the last window and the last state of one sequence, from all its kept inputs (n, ...)."""
    x, g, beta = history
    line = np.concatenate([np.zeros((WIDTH - 1, CHANNELS)), x])
    y = sum(line[i:i + len(x)] * WEIGHT[:, i] for i in range(WIDTH))
    y = (y * reference.sigmoid(y)).reshape(1, len(x), -1, S)
    state = reference.recurrent(y[:, :, :H_K], y[:, :, H_K:2 * H_K], y[:, :, 2 * H_K:], g[None], beta[None],
                                head_map="interleaved", qk_l2norm=True)[1][0]
    return line[len(line) - WIDTH + 1:].T, state


def check(what, windows, states, row, history):
    window, state = truth(history)
    error = np.abs(states.numpy()[row] - state).max() / np.abs(state).max()
    assert error <= 1e-5, f"{what}: off by {error:.1e}"
    assert (windows.numpy()[row, 0] == window.astype(np.float32)).all(), what
    print(f"  {what}: {len(history[0])} tokens, row {row}, error {error:.1e}")


def extend(history, part, seq, n):
    """The first n new tokens of one sequence behind its history."""
    new = [x[seq, :n] for x in part]
    return new if history is None else [np.concatenate(pair) for pair in zip(history, new, strict=True)]


def llama_layout():
    """A prompt, a draft of which every sequence keeps another part, a permuted and forked batch of few tokens."""
    mem_size, K, head = 6, 4, 1
    arena = Arena(16 << 20)
    cache_s, cache_r = arena.new(N_EMBD_S, mem_size * K), arena.new(N_EMBD_R, mem_size * K)
    cache_s.numpy()[:], cache_r.numpy()[:] = np.nan, np.nan          # ggml does not clear what it hands out
    states = cache_s.reshape((S, S, H_V, mem_size * K))
    windows = cache_r.reshape((WIDTH - 1, CHANNELS, 1, mem_size * K))

    def batch(histories, rows_in, n_tokens):
        part = inputs(len(rows_in), n_tokens)
        cells = head + np.arange(len(rows_in))
        rows_out = cells[:, None] + mem_size * np.arange(K)
        layer(*part, windows, states, np.asarray(rows_in), rows_out)
        return [[extend(h, part, i, n) for n in range(n_tokens + 1)] for i, h in enumerate(histories)]

    print("llama.cpp's rollback groups")
    after = batch([None] * 3, [-1] * 3, 6)
    kept = [options[6] for options in after]
    after = batch(kept, [1, 2, 3], K)                                # the last token and K - 1 drafts
    accepted = [1, 4, 2]
    kept = [options[n] for options, n in zip(after, accepted, strict=True)]
    rows = [head + i + mem_size * (K - n) for i, n in enumerate(accepted)]
    for i in range(3):
        check(f"sequence {i} keeps {accepted[i]} of {K}", windows, states, rows[i], kept[i])
    order = [2, 0, 0]                                                # swapped cells, and sequence 0 forked
    kept, rows = [kept[i] for i in order], [rows[i] for i in order]
    older = states.numpy()[head + 3 * mem_size].copy()
    after = batch(kept, rows, 2)
    for i in range(3):
        check(f"cell {head + i} goes on from sequence {order[i]}", windows, states, head + i, after[i][2])
        check("    and one back", windows, states, head + i + mem_size, after[i][1])
    assert (states.numpy()[head + 3 * mem_size] == older).all()      # 2 tokens have no snapshot 3 back
    assert np.isnan(states.numpy()[0]).all() and np.isnan(states.numpy()[5::mem_size]).all()      # nobody's cells


def ik_layout():
    """One row a slot: the window, then the state as [key][value]."""
    n_slots = 4
    arena = Arena(4 << 20)
    cache = arena.new(N_EMBD_R + N_EMBD_S, n_slots)
    cache.numpy()[:] = np.nan
    pitch = cache.nb[1]
    windows = cache.view((WIDTH - 1, CHANNELS, 1, n_slots), (4, 4 * (WIDTH - 1), 4 * N_EMBD_R, pitch))
    states = cache.view((S, S, H_V, n_slots), (4, 4 * S, 4 * S * S, pitch), offset=4 * N_EMBD_R).transpose()
    print("ik_llama.cpp's rows")
    slots, kept = np.array([2, 0]), [None, None]
    for rows_in, n_tokens in (([-1, -1], 5), (slots, 1), (slots, 3)):
        part = inputs(2, n_tokens)
        layer(*part, windows, states, np.asarray(rows_in), slots)
        kept = [extend(h, part, i, n_tokens) for i, h in enumerate(kept)]
        for i, slot in enumerate(slots):
            check(f"slot {slot}", windows, states, slot, kept[i])
    assert np.isnan(cache.numpy()[0, 0, [1, 3]]).all()


if __name__ == "__main__":
    llama_layout()
    ik_layout()
    print("ok")
