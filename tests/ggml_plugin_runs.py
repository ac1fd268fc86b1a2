"""Whole tiny models run by an unmodified llama.cpp with and without the plug-in, in a process that may be changed by it.

    python tests/ggml_plugin_runs.py PLUGIN FOLDER SEED     JSON on stdout: {arch: {scenario: [error, counts]}}

A context has the backends that were there when it was made: the runs without the plug-in come first.
"""

import ctypes as C
import json
import sys
from pathlib import Path

import gguf_models as models
import numpy as np

from gdn.adapters import ggml
from tests.peers import llama

STATELESS = ("clef",)


def tokens(rng, n):
    return rng.integers(0, models.N_VOCAB, n)


def prefill_and_decode(model, rng, n_threads=1):
    context = model.context(n_ctx=256, n_threads=n_threads, n_threads_batch=n_threads)
    return [context.decode(tokens(rng, n)) for n in (70, 1, 1, 1, 3, 17, 1)]


def threads(model, rng):
    return prefill_and_decode(model, rng, n_threads=2)


def sequences(model, rng):
    """Lengths that differ, sequences that leave, come back and are copied: states move between rows."""
    context = model.context(n_ctx=512, n_seq_max=4)
    seen = [context.decode(tokens(rng, 9), seq_id=seq_id) for seq_id in (2, 0, 3)]
    seen += [context.decode(tokens(rng, 3), seq_id=[3, 0, 2]) for _ in range(2)]
    context.rollback(0, 0)
    seen.append(context.decode(tokens(rng, 2), seq_id=[3, 2]))
    context.copy(2, 1)
    seen.append(context.decode(tokens(rng, 7), seq_id=[1, 1, 1, 2, 2, 2, 3]))
    context.rollback(3, 0)
    seen.append(context.decode(tokens(rng, 5), seq_id=[0, 0, 0, 1, 2]))
    return seen


def rollback(model, rng):
    """Snapshots: taken back after a batch longer than their number, a shorter one, and one token."""
    context = model.context(n_ctx=256, n_seq_max=2, n_rs_seq=3)
    seen = []
    for n, back in ((20, 0), (5, 3), (4, 2), (2, 1), (1, 0), (1, 1), (6, 3)):
        seen.append(context.decode(tokens(rng, n)))
        if back:
            seen.append(np.full((1, 1), context.rollback(0, context.ends[0] - back), np.float32))
    seen.append(context.decode(tokens(rng, 2), seq_id=[0, 1]))
    return seen


def save_and_load(model, rng):
    context, library = model.context(n_ctx=256, n_seq_max=2), model.library
    seen = [context.decode(tokens(rng, 12))]
    size = raw.llama_state_seq_get_size(context.pointer, 0)
    data = C.create_string_buffer(size)
    assert raw.llama_state_seq_get_data(context.pointer, data, size, 0) == size
    other = model.context(n_ctx=256, n_seq_max=2)
    assert raw.llama_state_seq_set_data(other.pointer, data, size, 1)
    other.ends[1] = 12
    seen += [other.decode(tokens(rng, 4), seq_id=1), other.decode(tokens(rng, 1), seq_id=1)]
    raw.llama_memory_clear(library.get_memory(other.pointer), True)      # the context again, from nothing
    other.ends.clear()
    return [*seen, other.decode(tokens(rng, 30)), other.decode(tokens(rng, 1))]


SCENARIOS = (prefill_and_decode, threads, sequences, rollback, save_and_load)


def embeddings(model, rng):
    """A model without logits and states: what its own nodes became."""
    watch = {"linear_attn_out-0", "linear_attn_out-2", "l_out-3"}
    context = model.context(watch, n_ctx=256, embeddings=True)
    context.decode(tokens(rng, 50))
    return [x.reshape(-1, models.E) for name in sorted(watch) for x in context.seen[name]]


def scenarios(arch):
    return (embeddings,) if arch in STATELESS else SCENARIOS


def run(arch, model, seed):
    return {scenario.__name__: scenario(model, np.random.default_rng(seed)) for scenario in scenarios(arch)}


def error(parts, refs):
    return max(float(abs(a - b).max() / (abs(b).max() or 1)) for a, b in zip(parts, refs, strict=True))


def main(plugin, folder, seed):
    global raw
    library = llama.load()
    raw = C.CDLL(library.path)
    raw.llama_state_seq_get_size.restype = raw.llama_state_seq_get_data.restype = C.c_size_t
    raw.llama_state_seq_set_data.restype = C.c_size_t
    raw.llama_state_seq_get_size.argtypes = [C.c_void_p, C.c_int32]
    for name in ("llama_state_seq_get_data", "llama_state_seq_set_data"):
        getattr(raw, name).argtypes = [C.c_void_p, C.c_char_p, C.c_size_t, C.c_int32]
    raw.llama_memory_clear.argtypes = [C.c_void_p, C.c_bool]
    loaded = {path.stem: library.model(path) for path in sorted(Path(folder).glob("*.gguf"))}
    refs = {arch: run(arch, model, seed) for arch, model in loaded.items()}
    backend = ggml.register(raw, plugin)
    result = {}
    for arch, model in loaded.items():
        result[arch] = {}
        for scenario in scenarios(arch):
            before = backend.counts()
            seen = scenario(model, np.random.default_rng(seed))
            counts = {name: n - before[name] for name, n in backend.counts().items()}
            result[arch][scenario.__name__] = [error(seen, refs[arch][scenario.__name__]), counts]
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
