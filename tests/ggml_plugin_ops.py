"""Graphs of single ops on the plug-in and on ggml's own CPU backend, in a process of its own.

    python tests/ggml_plugin_ops.py                 JSON on stdout: [[case, error], ...]
    python tests/ggml_plugin_ops.py loading         loads, refuses and unloads; the last line says "well"
"""

import ctypes as C
import json
import sys

import numpy as np

import gdn
from gdn.adapters import ggml as plugin
from tests.peers import ggml

# (heads, head size, tokens, sequences, value heads a key head, permuted, per channel, snapshots): those of ggml's own
# test of its backends for GATED_DELTA_NET, and what it leaves out.
DELTA = [
    (32, 128, 1, 1), (32, 16, 1, 1), (32, 16, 1, 1, 1, 1, 1), (32, 16, 1, 1, 1, 0, 1), (16, 64, 1, 2), (4, 64, 4, 1),
    (4, 64, 4, 2), (8, 32, 4, 2, 2), (4, 64, 4, 2, 1, 1), (4, 64, 4, 1, 1, 1), (4, 64, 1, 1, 1, 0, 1), (4, 64, 1, 2, 1, 0, 1),
    (4, 16, 1, 2, 1, 0, 1), (4, 32, 4, 1, 1, 0, 1), (4, 64, 4, 2, 1, 0, 1), (8, 32, 4, 2, 2, 0, 1), (4, 64, 4, 2, 1, 1, 1),
    (4, 16, 4, 2, 1, 1, 1), (4, 64, 64, 1), (4, 64, 127, 1), (4, 64, 256, 1), (4, 64, 65, 1), (4, 64, 100, 1), (4, 64, 200, 1),
    (4, 64, 127, 2), (4, 64, 64, 1, 1, 0, 1), (4, 64, 33, 1, 1, 0, 1), (4, 64, 100, 1, 1, 0, 1), (4, 16, 2, 1, 1, 0, 0, 2),
    (4, 32, 4, 1, 1, 0, 0, 4), (4, 64, 4, 2, 1, 0, 0, 4), (8, 128, 4, 1, 1, 0, 0, 4), (4, 64, 4, 2, 1, 0, 1, 4),
    (8, 32, 4, 2, 2, 0, 1, 4), (4, 32, 8, 1, 1, 0, 0, 3), (4, 64, 16, 2, 1, 0, 0, 4),
    (2, 128, 3, 3, 4, 1, 0, 5), (3, 20, 17, 2, 3, 0, 1, 2)]
CACHED = [(4, 32, 2, 1, 2), (4, 64, 4, 1, 2), (4, 32, 4, 1, 4), (8, 32, 4, 2, 4), (4, 32, 8, 1, 4)]
CONV = [(width, channels, tokens, n_seqs) for width in (3, 4, 9) for channels in (1024, 1536, 2048)
        for tokens, n_seqs in ((1, 1), (width + 1, 1), (1, 4), (64, 1), (64, 4))]


class Backend:
    def __init__(self, lib, base, registered):
        self.base = base
        lib.ggml_backend_reg_dev_get.restype, lib.ggml_backend_reg_dev_get.argtypes = C.c_void_p, [C.c_void_p, C.c_size_t]
        for name, result, *arguments in (
                ("dev_init", C.c_void_p, C.c_void_p, C.c_char_p), ("graph_compute", C.c_int, C.c_void_p, C.c_void_p),
                ("dev_supports_op", C.c_bool, C.c_void_p, C.c_void_p), ("free", None, C.c_void_p)):
            function = getattr(base, f"ggml_backend_{name}")
            function.restype, function.argtypes = result, arguments
        self.device = lib.ggml_backend_reg_dev_get(registered.pointer, 0)
        self.pointer = base.ggml_backend_dev_init(self.device, None)
        find = lib.ggml_backend_reg_get_proc_address
        C.CFUNCTYPE(None, C.c_void_p, C.c_int)(find(registered.pointer, b"ggml_backend_set_n_threads"))(self.pointer, 2)

    def compute(self, ctx, result):
        graph = ctx.library.ggml_new_graph(ctx.pointer)
        ctx.library.ggml_build_forward_expand(graph, result.pointer)
        assert self.base.ggml_backend_graph_compute(self.pointer, graph) == 0


def delta_inputs(ctx, rng, heads, size, n_tokens, n_seqs, repeat=1, permuted=0, kda=0):
    def rows(n):
        values = rng.standard_normal((n_seqs, n_tokens, n, size)).astype(np.float32)
        return ctx.array(values.swapaxes(1, 2)).permute(0, 2, 1, 3) if permuted else ctx.array(values)

    q, k, v = rows(heads), rows(heads), rows(heads * repeat)
    q, k = (ctx.op("l2_norm", x, 1e-6) for x in (q, k))
    g = ctx.array(rng.uniform(-20, -1e-4, (n_seqs, n_tokens, heads * repeat, size if kda else 1)))
    beta = ctx.array(rng.uniform(0, 1, (n_seqs, n_tokens, heads * repeat, 1)))
    return q, k, v, g, beta, ctx.array(rng.standard_normal((n_seqs, heads * repeat, size, size)))


def difference(x, ref):
    keep = ~np.isnan(ref)
    return float(abs(x - ref)[keep].max() / abs(ref[keep]).max())


def both(library, backend, build, written=slice(None)):
    """The error of what the plug-in computes; build(ctx) gives the tensor to compute and the one to look at."""
    seen = []
    for compute in (lambda ctx, t: ctx.compute(t), backend.compute):
        ctx = library.context(512 << 20)
        result, look = build(ctx)
        look.numpy()[...] = np.nan
        compute(ctx, result)
        seen.append(look.numpy().copy().ravel()[written])
    assert (np.isnan(seen[0]) == np.isnan(seen[1])).all()
    return difference(seen[1], seen[0])


def delta(case):
    heads, size, n_tokens, n_seqs, repeat, permuted, kda, K = (*case, *(1, 0, 0, 1)[len(case) - 4:])

    def build(ctx):
        inputs = delta_inputs(ctx, np.random.default_rng(1), heads, size, n_tokens, n_seqs, repeat, permuted, kda)
        out = ctx.op("gated_delta_net", *inputs, K)
        return out, out
    return build


def cached(case):
    """Snapshots copied into a cache by the graph."""
    heads, size, n_tokens, n_seqs, K = case

    def build(ctx):
        D, n_written = size * size * heads, min(n_tokens, K)
        out = ctx.op("gated_delta_net", *delta_inputs(ctx, np.random.default_rng(1), heads, size, n_tokens, n_seqs), K)
        source = out.view((D, n_seqs, n_written), [4 * D, 4 * D * n_seqs, 4 * D * n_seqs * n_written],
                          4 * size * heads * n_tokens * n_seqs)
        cache = ctx.new(D, n_seqs + 1, K + 1)
        target = cache.view((D, n_seqs, n_written), [4 * D, 4 * D * (n_seqs + 1), 4 * D * (n_seqs + 1) * K])
        return ctx.op("cpy", source, target), cache
    return build


def conv(case, silu):
    width, channels, n_tokens, n_seqs = case

    def build(ctx):
        rng = np.random.default_rng(1)
        x = ctx.array(rng.standard_normal((n_seqs, channels, width - 1 + n_tokens)))
        out = ctx.op("ssm_conv", x, ctx.array(rng.standard_normal((channels, width))))
        out = ctx.op("silu", out) if silu else out
        return out, out
    return build


def loaded():
    library = ggml.load()
    folder = ggml.folder_of("libggml", "libggml-python") / "lib64"
    lib, base = C.CDLL(str(folder / "libggml.so")), C.CDLL(str(folder / "libggml-base.so"))
    return library, lib, base


def main():
    library, lib, base = loaded()
    registered = plugin.register(lib)
    backend = Backend(lib, base, registered)
    result = [[f"delta {case}", both(library, backend, delta(case))] for case in DELTA]
    result += [[f"cached {case}", both(library, backend, cached(case))] for case in CACHED]
    counts = registered.counts()
    assert counts["delta"] == len(DELTA) + len(CACHED) == counts["delta_norms"], counts
    assert counts["delta_copies"] == len(CACHED), counts
    result += [[f"conv {case} {silu}", both(library, backend, conv(case, silu))] for case in CONV for silu in (False, True)]
    assert registered.counts()["conv"] == 2 * len(CONV)
    base.ggml_backend_free(backend.pointer)
    print(json.dumps(result))


def loading():
    library, lib, base = loaded()
    for path in (gdn.get_library(), __file__, "/nowhere.so"):
        try:
            plugin.register(lib, path)
            raise AssertionError(f"{path} was taken for the plug-in")
        except RuntimeError as error:
            assert path in str(error)
    lib.ggml_backend_reg_count.restype = C.c_size_t
    before = lib.ggml_backend_reg_count()
    lib.ggml_backend_unload.argtypes = [C.c_void_p]
    for _ in range(3):
        registered = plugin.register(lib)
        assert lib.ggml_backend_reg_count() == before + 1
        try:
            plugin.register(lib)
            raise AssertionError("it was loaded twice")
        except RuntimeError:
            assert lib.ggml_backend_reg_count() == before + 1
        backend = Backend(lib, base, registered)
        both(library, backend, delta(DELTA[5]))
        base.ggml_backend_free(backend.pointer)
        lib.ggml_backend_unload(registered.pointer)
        assert lib.ggml_backend_reg_count() == before
    print("well")


if __name__ == "__main__":
    loading() if sys.argv[1:] == ["loading"] else main()
