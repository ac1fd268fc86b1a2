"""The C face through ctypes: the header's structs, the table, and calls on states whose memory is watched."""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

import numpy as np
from helpers import Carved

(OK, NULL, TYPE, SHAPE, STRIDE, VALUE, ROW, SCRATCH, ABI, FULL, UNKNOWN, LOST, BUSY, ROLLBACK, DAMAGED,
 LOCKED, TWICE) = range(17)
INT64S = POINTER(c_int64)


class Tensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("type", c_int32), ("ne", c_int64 * 4), ("nb", c_int64 * 4)]


class Call(ctypes.Structure):
    """What the arguments of the delta rule and of the convolution end with."""

    _fields_ = [("state", Tensor), ("state_out", Tensor), ("n_seqs", c_int64), ("n_snapshots", c_int64),
                ("snapshot_nb", c_int64), ("rows_in", INT64S), ("rows_out", INT64S), ("cu_seqlens", INT64S),
                ("scratch", c_void_p), ("scratch_size", c_size_t), ("message", c_char_p), ("message_size", c_size_t),
                ("log_in", INT64S), ("n_log_in", c_int64), ("log_out", INT64S), ("n_log_out", c_int64), ("parents", INT64S),
                ("checkpoints", INT64S), ("n_checkpoints", c_int64), ("rounding", c_int32), ("call_reserved", c_int32),
                ("seed", c_uint64)]


class DeltaArgs(ctypes.Structure):
    _anonymous_ = ("call",)
    TENSORS = ("q", "k", "v", "g", "beta", "out", "state", "state_out")
    _fields_ = [("size", c_uint32), ("head_map", c_int32), ("mode", c_int32), ("flags", c_uint32), ("scale", c_float),
                ("l2_eps", c_float), ("n_threads", c_int32), ("reserved", c_int32),
                *[(n, Tensor) for n in ("q", "k", "v", "g", "beta", "out", "log_k", "log_d", "log_g")], ("call", Call)]


class ConvArgs(ctypes.Structure):
    _anonymous_ = ("call",)
    TENSORS = ("x", "weight", "bias", "out", "state", "state_out")
    _fields_ = [("size", c_uint32), ("activation", c_int32), ("n_threads", c_int32), ("reserved", c_int32),
                *[(n, Tensor) for n in ("x", "weight", "bias", "out", "log_x")], ("call", Call)]


# The smallest size of each: up to the log.
LEAST = {args: args.call.offset + Call.log_in.offset for args in (DeltaArgs, ConvArgs)}


class Params(ctypes.Structure):
    _fields_ = [("size", c_uint32), *[(name, c_int32) for name in (
        "n_slots", "n_rollback", "n_layers", "H_v", "S_k", "S_v", "conv_channels", "conv_width", "spare", "form", "H_k",
        "per_channel", "log_capacity", "n_spare", "dtype", "head_map")], ("tag", c_uint64)]


class StepArgs(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("step", c_uint32), ("n_seqs", c_int64), ("n_snapshots", c_int64),
                *[(name, INT64S) for name in ("seq_ids", "n_tokens", "positions", "rows_in", "rows_out")],
                ("failed", c_int64), ("first", c_int32), ("reserved", c_int32), ("nonce", c_uint64), ("n_log_in", c_int64),
                ("n_log_out", c_int64), *[(name, INT64S) for name in ("log_in", "log_out", "parents", "forks")],
                ("n_forks", c_int64), ("max_checkpoints", c_int64), ("checkpoints", INT64S), ("n_checkpoints", c_int64)]


def function(*types, result=c_int32):
    return ctypes.CFUNCTYPE(result, *types)


class Api(ctypes.Structure):
    tensor, size, step, id_ = POINTER(Tensor), POINTER(c_size_t), POINTER(StepArgs), c_int64
    _fields_ = [("abi", c_uint32), ("size", c_uint32),
                ("gated_delta_net", function(POINTER(DeltaArgs))),
                ("gated_delta_net_scratch_size", function(POINTER(DeltaArgs), size)),
                ("causal_conv1d", function(POINTER(ConvArgs))),
                ("causal_conv1d_scratch_size", function(POINTER(ConvArgs), size)),
                ("l2_norm", function(tensor, c_float, c_int32, tensor, c_int32)),
                ("rms_norm_gated", function(tensor, tensor, tensor, c_float, c_int32, tensor, c_int32)),
                ("decay_gate", function(tensor, tensor, tensor, c_int32, c_float, tensor, c_int32)),
                ("solve_tri", function(tensor, tensor, c_int32, c_int32, tensor, c_int32)),
                ("status_string", function(c_int32, result=c_char_p)),
                ("ring_size", function(POINTER(Params), size)),
                ("ring_init", function(POINTER(Params), c_void_p, c_size_t)),
                ("ring_attach", function(c_void_p, c_size_t)),
                ("ring_acquire", function(c_void_p, id_, INT64S)),
                ("ring_release", function(c_void_p, id_)),
                ("ring_begin", function(c_void_p, step)),
                ("ring_commit", function(c_void_p, step)),
                ("ring_abort", function(c_void_p, step)),
                ("ring_rollback", function(c_void_p, id_, c_int64)),
                ("ring_reset", function(c_void_p, id_)),
                ("ring_copy", function(c_void_p, id_, id_)),
                ("ring_position", function(c_void_p, id_, INT64S)),
                ("ring_max_rollback", function(c_void_p, id_, INT64S)),
                ("ring_save_size", function(c_void_p, id_, size)),
                ("ring_save", function(c_void_p, id_, c_void_p, c_size_t, size)),
                ("ring_load", function(c_void_p, id_, c_void_p, c_size_t)),
                ("ring_conv", function(c_void_p, c_int64, tensor)),
                ("ring_ssm", function(c_void_p, c_int64, tensor)),
                ("ring_log", function(c_void_p, c_int64, tensor, tensor, tensor, tensor)),
                ("ring_accept", function(c_void_p, id_, INT64S, c_int64)),
                ("ring_copy_state", function(c_void_p, id_, id_)),
                ("ring_save_state_size", function(c_void_p, id_, size)),
                ("ring_save_state", function(c_void_p, id_, c_void_p, c_size_t, size)),
                ("set_parallel_for", function(c_void_p, c_void_p))]


def tensor(x):
    t = Tensor()
    if x is not None:
        t.data = x.ctypes.data
        t.ne[:] = list(x.shape[::-1]) + [1] * (4 - x.ndim)
        t.nb[:] = list(x.strides[::-1]) + [x.strides[0] * x.shape[0] if x.ndim else 4] * (4 - x.ndim)
    return t


def numbers(*values):
    return (c_int64 * max(1, len(values)))(*values)


class CCall:
    """A call on states, its scratch exactly as large as asked for; keeps everything C points to alive."""

    def __init__(self, arrays, out_shape, **fields):
        self.a = a = self.Args(size=ctypes.sizeof(self.Args), n_seqs=out_shape[0], n_snapshots=1)
        self.out, self.scratch = Carved(shape=out_shape), np.empty(0, np.uint8)
        self.arrays = {**arrays, "out": self.out.array}
        for name, x in self.arrays.items():
            setattr(a, name, tensor(x))
        self.text = ctypes.create_string_buffer(200)
        a.message = ctypes.cast(self.text, c_char_p)
        a.message_size = 200
        self.set(**fields)

    def set(self, **fields):
        for name, value in fields.items():
            if name in ("rows_in", "rows_out", "cu_seqlens", "log_in", "log_out", "parents", "checkpoints") and value is not None:
                keep = np.ascontiguousarray(value, np.int64)
                self.arrays[name] = keep
                value = keep.ctypes.data_as(INT64S)
            setattr(self.a, name, value)
        return self

    def scratch_size(self, api, n_bytes):
        return getattr(api, self.name + "_scratch_size")(byref(self.a), n_bytes)

    def call(self, api):
        return getattr(api, self.name)(byref(self.a))

    def with_scratch(self, api, slack=0, offset=0):
        """Exactly the bytes the size function asks for, `offset` behind a multiple of 64, canaries around them."""
        n = c_size_t(0)
        assert self.scratch_size(api, byref(n)) == OK, self.text.value
        self.scratch = np.full(n.value + offset + 128, 0xA5, np.uint8)
        self.n_scratch, self.first = n.value, -self.scratch.ctypes.data % 64 + offset
        self.a.scratch = self.scratch.ctypes.data + self.first
        self.a.scratch_size = n.value + slack
        return self

    def run(self, api):
        status = self.call(api)
        assert status == OK, (status, self.text.value)
        around = np.delete(self.scratch, slice(self.first, self.first + self.n_scratch))
        assert (around == 0xA5).all(), "scratch was overrun"
        assert self.out.intact()
        return self.out.array

    def refused(self, api, status, *memory):
        """Both functions refuse and write nothing, `memory` included; the message."""
        memory = (self.out.words, self.scratch, *memory)
        before = [m.copy() for m in memory]
        self.text.value = b""
        assert self.call(api) == status, self.text.value
        needed = c_size_t(12345)
        assert self.scratch_size(api, byref(needed)) == status and needed.value == 12345
        assert all(np.array_equal(a, b) for a, b in zip(before, memory, strict=True)), "memory was written"
        return self.text.value


class DeltaCall(CCall):
    """The delta rule on the arrays of a case."""

    Args, name = DeltaArgs, "gated_delta_net"

    def __init__(self, c, state_out=None, **fields):
        c = {n: x[..., None] if n in ("g", "beta") and x.ndim == 3 else x for n, x in c.items()}
        super().__init__({**c, "state_out": state_out}, c["v"].shape, **{"l2_eps": 1e-6, **fields})


class ConvCall(CCall):
    Args, name = ConvArgs, "causal_conv1d"

    def __init__(self, x, weight, bias=None, state=None, state_out=None, **fields):
        super().__init__({"x": x, "weight": weight, "bias": bias, "state": state, "state_out": state_out}, x.shape, **fields)


# ---- refusals ------------------------------------------------------------------------------------------------------

def spoiled(name, **fields):
    def spoil(call):
        t = getattr(call.a, name)
        for field, value in fields.items():
            if field in ("ne", "nb"):
                getattr(t, field)[value[0]] = value[1]
            else:
                setattr(t, field, value)
    return spoil


# What both calls on states refuse, of two sequences of five tokens with a row of state each.
def row_nb(c):
    """Bytes between rows of state_out: along ne[3] for the delta rule, along ne[2] for the convolution."""
    return c.a.state_out.nb[3 if hasattr(c.a, "q") else 2]


REFUSED = {
    "args size 0": (lambda c: c.set(size=0), ABI),
    "args size of no call": (lambda c: c.set(size=LEAST[c.Args] - 8), ABI),
    "args size of no struct": (lambda c: c.set(size=2**32 - 1), ABI),
    "rounding unknown": (lambda c: c.set(rounding=2), VALUE),
    "seed given": (lambda c: c.set(seed=1), VALUE),
    "log_in without entries": (lambda c: c.set(log_in=[0, 0], n_log_in=1), NULL),
    "log_out without entries": (lambda c: c.set(log_out=[-1] * 10, n_log_out=5), NULL),
    "log_in absent": (lambda c: c.set(n_log_in=1), SHAPE),
    "log_in negative": (lambda c: c.set(log_in=[0, 0], n_log_in=-1), SHAPE),
    "log_out absent": (lambda c: c.set(n_log_out=5), SHAPE),
    "parents later": (lambda c: c.set(parents=[-1, 0, 1, 3, 0] * 2), VALUE),
    "checkpoints absent": (lambda c: c.set(n_checkpoints=1), SHAPE),
    "checkpoints of no sequence": (lambda c: c.set(checkpoints=[2, 0, 1], n_checkpoints=1), ROW),
    "checkpoints behind the end": (lambda c: c.set(checkpoints=[1, 6, 1], n_checkpoints=1), VALUE),
    "checkpoints before the log": (lambda c: c.set(checkpoints=[1, -1, 1], n_checkpoints=1), VALUE),
    "checkpoints of a row twice": (lambda c: c.set(checkpoints=[1, 2, 1], n_checkpoints=1), TWICE),
    "out broadcast": (spoiled("out", nb=(2, 0)), STRIDE),
    "state_out broadcast": (spoiled("state_out", nb=(0, 0)), STRIDE),
    "snapshot_nb odd": (lambda c: c.set(n_snapshots=2, snapshot_nb=6), STRIDE),
    "snapshot_nb over the rows of rows_in": (
        lambda c: (c.set(n_snapshots=2, snapshot_nb=1 << 20, rows_in=[0, 1]), setattr(c.a, "state", c.a.state_out)), VALUE),
    "snapshot_nb of one row": (lambda c: c.set(n_snapshots=2, snapshot_nb=row_nb(c)), TWICE),
    "snapshot_nb of one row back": (lambda c: c.set(n_snapshots=2, snapshot_nb=-row_nb(c)), TWICE),
    "no snapshots": (lambda c: c.set(n_snapshots=0), VALUE),
    "negative snapshots": (lambda c: c.set(n_snapshots=-3), VALUE),
    "n_threads negative": (lambda c: c.set(n_threads=-2), VALUE),
    "n_seqs too many": (lambda c: c.set(n_seqs=3), SHAPE),
    "n_seqs negative": (lambda c: c.set(n_seqs=-1), SHAPE),
    "too few rows for snapshots": (lambda c: c.set(n_snapshots=2), SHAPE),
    "rows_in out of range": (lambda c: c.set(rows_in=[0, 2]), ROW),
    "rows_in below -1": (lambda c: c.set(rows_in=[0, -2]), ROW),
    "rows_out out of range": (lambda c: c.set(rows_out=[0, 2]), ROW),
    "rows_out below -1": (lambda c: c.set(rows_out=[0, -2]), ROW),
    "rows_out twice": (lambda c: c.set(rows_out=[1, 1]), TWICE),
    "lengths over several rows": (lambda c: c.set(cu_seqlens=[0, 2, 5]), SHAPE),
    "reserved": (lambda c: c.set(reserved=1), VALUE),
}


def check_refusal(api, call, name, status, *memory):
    """The call is refused, in words that name the argument that `name` starts with; the message is optional."""
    message, word = call.refused(api, status, *memory), name.split()[0]
    if status != ABI:
        assert message, "no message"
        assert word in ("no", "negative", "too", "lengths") or word.encode() in message, message
    call.set(message=None)
    assert call.call(api) == status


def check_null(function, arguments, optional=()):
    """Without any one of its pointers, but those at `optional`, the function is GDN_ERR_NULL; with all of them it is not."""
    assert function(*arguments) != NULL
    pointers = [i for i, type in enumerate(function.argtypes) if type not in (c_int32, c_int64, c_size_t, c_float)]
    for i in pointers:
        given = [None if i == j else argument for j, argument in enumerate(arguments)]
        assert (function(*given) == NULL) == (i not in optional), f"argument {i}"
