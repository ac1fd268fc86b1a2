"""The plug-in inside llama.cpp: what is neither matmul nor attention, and whole calls, with over without it.

    python -m benchmarks.llama [--repeats 3] [--steps 40]

A model of real extents with random weights is made on the spot; CPU time of one thread, so that other work on the machine
does not count.  The share of matmuls and attention comes from a run whose nodes are timed one by one.
"""

import argparse
import ctypes as C
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import gguf_models as models  # noqa: E402

from gdn.adapters import ggml  # noqa: E402
from tests.peers import llama  # noqa: E402

N_TOKENS = 512
OTHERS = {"MUL_MAT", "MUL_MAT_ID", "FLASH_ATTN_EXT", "SOFT_MAX"}        # not a linear-attention layer's own
models.E, models.N_BLOCKS, models.FF, models.N_VOCAB = 2048, 8, 6144, 4096


class Quantized(models.Tensors):
    """Matrices as random Q4_0 blocks: a half-precision scale and 32 numbers of 4 bits."""

    def __init__(self, rng):
        super().__init__(rng)
        self.types = {}

    def add(self, name, *shape, scale=None):
        if len(shape) != 2 or shape[1] % 32 or "conv" in name:
            super().add(name, *shape, scale=scale)
            return
        blocks = self.rng.integers(0, 256, (shape[0], shape[1] // 32, 18), dtype=np.uint8)
        blocks[..., :2] = np.array([(shape[1] if scale is None else 1) ** -0.5 / 5], np.float16).view(np.uint8)
        self[name] = blocks.reshape(shape[0], -1)
        self.types[name] = (GGMLQuantizationType.Q4_0, self[name])


def write(path):
    t, heads, size = Quantized(np.random.default_rng(0)), 16, 256
    meta = {"vocab_size": models.N_VOCAB, "block_count": models.N_BLOCKS, "context_length": 4096,
            "embedding_length": models.E, "feed_forward_length": models.FF, "attention.layer_norm_rms_epsilon": 1e-6,
            "ssm.conv_kernel": 4, "rope.freq_base": 10000.0, **models._gdn_meta("qwen35", 16, 32, 128),
            "attention.head_count": heads, "attention.head_count_kv": 2, "attention.key_length": size,
            "attention.value_length": size, "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0],
            "full_attention_interval": 4}
    for name in ("token_embd.weight", "output.weight"):
        t.add(name, models.N_VOCAB, models.E)
    t.norm("output_norm.weight", models.E)
    for il in range(models.N_BLOCKS):
        models._norms(t, "qwen35", il)
        if il % 4 != 3:
            models._gdn(t, "qwen35", il, 16, 32, 128, 4, False)
        else:
            b = f"blk.{il}."
            for name, rows in (("attn_q", 2 * heads * size), ("attn_k", 2 * size), ("attn_v", 2 * size)):
                t.add(f"{b}{name}.weight", rows, models.E)
            t.add(b + "attn_output.weight", models.E, heads * size)
            for x in "qk":
                t.norm(f"{b}attn_{x}_norm.weight", size)
        models._ffn(t, "qwen35", il)
    models.write(path, "qwen35", meta, t, t.types)


class Timed(llama.Context):
    """Every node computed and timed alone."""

    times = None

    def _look(self, node, ask, _):
        if not ask:
            name = self.describe(node).decode()
            self.times[name] = self.times.get(name, 0) + time.process_time() - self.last
        self.last = time.process_time()
        return True


def share(context, call):
    """Of matmuls and attention, in a call of a Timed context."""
    context.times = {}
    call(context)
    context.times = {}
    call(context)
    return sum(t for name, t in context.times.items() if name in OTHERS) / sum(context.times.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    library = llama.load()
    lib = C.CDLL(library.path)
    lib.ggml_op_desc.restype, lib.ggml_op_desc.argtypes = C.c_char_p, [C.c_void_p]
    lib.llama_memory_clear.argtypes = [C.c_void_p, C.c_bool]
    options = {"n_ctx": 2048, "n_batch": N_TOKENS, "n_ubatch": N_TOKENS}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "model.gguf"))
        model = library.model(Path(folder, "model.gguf"))
        timed = Timed(model, {"every node"}, options)
        timed.describe = lib.ggml_op_desc
        without = model.context(**options)
        ggml.register(lib)
        plugged = model.context(**options)

        def prefill(context):
            lib.llama_memory_clear(library.get_memory(context.pointer), True)
            context.ends.clear()
            context.decode(np.arange(N_TOKENS))

        for name, call, n in (("prefill", prefill, args.repeats), ("decode", lambda c: c.decode([5]), args.steps)):
            others, times = share(timed, call), {without: [], plugged: []}
            for context in times:
                call(context)
            for _ in range(n):
                for context, seen in times.items():
                    start = time.process_time()
                    call(context)
                    seen.append(time.process_time() - start)
            a, b = (statistics.median(seen) for seen in times.values())
            print(f"{name:8} {1000 * a:9.1f} ms without, {1000 * b:9.1f} ms with: {a / b:.3f} times as fast; neither matmul nor "
                  f"attention {(b - others * a) / (a - others * a):.2f} of {100 * (1 - others):.1f} %")


if __name__ == "__main__":
    main()
