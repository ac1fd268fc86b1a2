"""ggml's own memory and operations through ctypes: enough of a binding to build tensors, run a graph, read strides.

The libraries come from the wheel ``libggml-python``.  Nothing here belongs to gdn: a ``Context`` owns an arena, tensors
live in it, and ``Tensor.address``, ``.ne`` and ``.nb`` are what another library needs to work on the same memory.

    ctx = load().context()
    q = ctx.new(128, 16, 7, 1)                 # ne[0] first, as ggml writes them
    q.numpy()[:] = ...                         # the same memory, axes reversed
    out = ctx.op("gated_delta_net", q, k, v, g, beta, state, 1)
    ctx.compute(out)
    gdn.Tensor(out.address, out.ne, out.nb, owner=ctx)

ggml checks little, and where it checks it aborts the process: K < 1, g, beta or a state that is not contiguous, q, k or
v whose rows are not.  S_k != S_v it does not check: it then reads out of bounds.
"""

import ctypes as C
import functools
import importlib.util
from pathlib import Path

import numpy as np

F32, I32, I64 = 0, 26, 27
DTYPES = {F32: np.float32, I32: np.int32, I64: np.int64}

ptr = C.c_void_p


class PeerMissing(ImportError):
    """The wheel is not installed, or lacks an operation."""


class InitParams(C.Structure):
    _fields_ = [("mem_size", C.c_size_t), ("mem_buffer", ptr), ("no_alloc", C.c_bool)]


class Plan(C.Structure):
    """ggml_cplan: its first members; the rest is the library's (older and newer ones differ there)."""

    _fields_ = [("work_size", C.c_size_t), ("work_data", ptr), ("n_threads", C.c_int), ("rest", C.c_char * 76)]


class TensorHead(C.Structure):
    """The members of ggml_tensor up to its operation's parameters, the same in every version bound here."""

    _fields_ = [("type", C.c_int), ("_backend", C.c_int), ("_buffer", ptr), ("ne", C.c_int64 * 4),
                ("nb", C.c_size_t * 4), ("op", C.c_int), ("op_params", C.c_int32 * 16)]


class Tensor:
    """A ggml tensor in a context's arena."""

    def __init__(self, ctx, pointer):
        if not pointer:
            raise MemoryError("ggml's arena is full")
        self.ctx, self.pointer = ctx, pointer
        self.head = TensorHead.from_address(pointer)

    @property
    def ne(self):
        return tuple(self.head.ne)

    @property
    def nb(self):
        return tuple(self.head.nb)

    @property
    def type(self):
        return self.head.type

    @property
    def address(self):
        return self.ctx.library.ggml_get_data(self.pointer)

    def numpy(self):
        """The tensor's memory as an array, axes reversed; it keeps the context alive."""
        dtype = np.dtype(DTYPES[self.type])
        reach = sum((n - 1) * b for n, b in zip(self.ne, self.nb, strict=True)) + dtype.itemsize
        memory = (C.c_char * (0 if 0 in self.ne else reach)).from_address(self.address)
        memory.owner = self.ctx
        return np.ndarray(self.ne[::-1], dtype, memory, strides=self.nb[::-1])

    def set(self, values):
        """Fill from an array-like that broadcasts to the reversed extents; returns the tensor."""
        self.numpy()[...] = np.asarray(values)
        return self

    def place(self, address):
        """Let the tensor's memory be elsewhere, as ggml's graph allocator does when it reuses a buffer."""
        words = (C.c_uint64 * 64).from_address(self.pointer)
        first = C.sizeof(TensorHead) // 8
        words[next(i for i in range(first, 64) if words[i] == self.address)] = address
        return self

    def view(self, ne, nb=None, offset=0):
        """ggml_view_4d: ``nb`` are the byte strides of the axes 1..3, contiguous if not given."""
        ne = tuple(ne) + (1,) * (4 - len(ne))
        if nb is None:
            nb = [self.nb[0] * ne[0], self.nb[0] * ne[0] * ne[1], self.nb[0] * ne[0] * ne[1] * ne[2]]
        return self.ctx.wrap(self.ctx.library.ggml_view_4d(self.ctx.pointer, self.pointer, *ne, *nb, offset))

    def permute(self, *axes):
        return self.ctx.wrap(self.ctx.library.ggml_permute(self.ctx.pointer, self.pointer, *axes))


class Context:
    """An arena of ``mem_size`` bytes and the graphs computed in it."""

    def __init__(self, library, mem_size=64 << 20):
        self.library = library
        self.pointer = library.ggml_init(InitParams(mem_size, None, False))
        if not self.pointer:
            raise MemoryError(f"ggml_init({mem_size}) failed")

    def __del__(self):
        if getattr(self, "pointer", None):
            self.library.ggml_free(self.pointer)

    def wrap(self, pointer):
        return Tensor(self, pointer)

    def new(self, *ne, type=F32):
        return self.wrap(self.library.ggml_new_tensor_4d(self.pointer, type, *ne, *(1,) * (4 - len(ne))))

    def array(self, values, type=F32):
        """A new contiguous tensor with the values of an array, axes reversed."""
        values = np.asarray(values)
        return self.new(*values.shape[::-1], type=type).set(values.reshape((1,) * (4 - values.ndim) + values.shape))

    def op(self, name, *args):
        """Append an operation: tensors and numbers as ggml_NAME takes them."""
        args = [a.pointer if isinstance(a, Tensor) else a for a in args]
        return self.wrap(getattr(self.library, f"ggml_{name}")(self.pointer, *args))

    def graph(self, *results, n_threads=1):
        """A callable that computes the results; the plan and its work memory are made once."""
        graph = self.library.ggml_new_graph(self.pointer)
        for result in results:
            self.library.ggml_build_forward_expand(graph, result.pointer)
        plan = self.library.plan(graph, n_threads)
        work = C.create_string_buffer(max(1, plan.work_size) + 64)
        plan.work_data = C.addressof(work) + -C.addressof(work) % 64
        compute, reference = self.library.ggml_graph_compute, C.byref(plan)

        def run(_keep=(work, results, self)):
            status = compute(graph, reference)
            if status != 0:
                raise RuntimeError(f"ggml_graph_compute returned {status}")
        return run

    def compute(self, *results, n_threads=1):
        self.graph(*results, n_threads=n_threads)()
        return results[0] if len(results) == 1 else results


class Library:
    """The functions used, declared; ``lookup`` finds each in the libraries given."""

    tensors, size, number, flag = ptr, C.c_size_t, C.c_int64, C.c_bool
    SIGNATURES = {
        "init": (ptr, InitParams), "free": (None, ptr), "get_data": (ptr, ptr),
        "new_tensor_4d": (ptr, ptr, C.c_int, number, number, number, number),
        "view_4d": (ptr, ptr, ptr, number, number, number, number, size, size, size, size),
        "permute": (ptr, ptr, ptr, C.c_int, C.c_int, C.c_int, C.c_int),
        "cont": (ptr, ptr, ptr), "cpy": (ptr, ptr, ptr, ptr), "concat": (ptr, ptr, ptr, ptr, C.c_int),
        "add": (ptr, ptr, ptr, ptr), "mul": (ptr, ptr, ptr, ptr), "silu": (ptr, ptr, ptr), "sigmoid": (ptr, ptr, ptr),
        "get_rows": (ptr, ptr, ptr, ptr), "set_rows": (ptr, ptr, ptr, ptr, ptr),
        "cumsum": (ptr, ptr, ptr), "softplus": (ptr, ptr, ptr),
        "l2_norm": (ptr, ptr, ptr, C.c_float), "rms_norm": (ptr, ptr, ptr, C.c_float),
        "ssm_conv": (ptr, ptr, ptr, ptr), "solve_tri": (ptr, ptr, ptr, ptr, flag, flag, flag),
        "gated_delta_net": (ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, number),
        "new_graph": (ptr, ptr), "build_forward_expand": (None, ptr, ptr),
        "graph_plan": (Plan, ptr, C.c_int, ptr), "graph_compute": (C.c_int, ptr, C.POINTER(Plan)),
    }

    def __init__(self, *libraries):
        for name, (result, *arguments) in self.SIGNATURES.items():
            function = next((getattr(lib, f"ggml_{name}") for lib in libraries if hasattr(lib, f"ggml_{name}")), None)
            if function is None:
                raise PeerMissing(f"ggml_{name} is not in {', '.join(lib._name for lib in libraries)}")
            function.restype, function.argtypes = result, arguments
            setattr(self, f"ggml_{name}", function)

    def plan(self, graph, n_threads):
        return self.ggml_graph_plan(graph, n_threads, None)

    def context(self, mem_size=64 << 20):
        return Context(self, mem_size)


def folder_of(package, wheel):
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise PeerMissing(f"the package {package} (wheel {wheel}) is not installed")
    return Path(spec.origin).parent


@functools.cache
def load():
    """The library from the wheel; PeerMissing if it is not there."""
    folder = folder_of("libggml", "libggml-python") / "lib64"
    base = C.CDLL(str(folder / "libggml-base.so"))
    cpu = C.CDLL(str(folder / "libggml-cpu.so"))
    cpu.ggml_cpu_init()
    return Library(base, cpu)


def delta_net_result(out, S_v, H_v, n_tokens, n_seqs, K=1):
    """gated_delta_net packs outputs and snapshots in one tensor: views (out, snapshots) of it.

    out has ne [S_v, H_v, n_tokens, n_seqs], snapshots [S_v, S_v, H_v, K * n_seqs], slot-major, slot 0 the newest.
    """
    size = 4 * S_v * H_v * n_tokens * n_seqs
    return out.view((S_v, H_v, n_tokens, n_seqs)), out.view((S_v, S_v, H_v, K * n_seqs), offset=size)
