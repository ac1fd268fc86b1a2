"""An unmodified llama.cpp through ctypes: whole models from GGUF files, batches, logits, and every node's values.

The library is the extension module of the wheel ``xllamacpp``, which exports llama.cpp's and ggml's C API.  It is loaded
for itself alone (``RTLD_LOCAL``), so that the other peers' ggml does not bind to its symbols; a library that needs them,
as a plug-in of ggml does, is loaded in a process of its own after ``load(everywhere=True)``.

    model = load().model("model.gguf")
    context = model.context(watch={"attn_norm-1", "linear_attn_out-1"})
    logits = context.decode([3, 1, 4])                  # (3, n_vocab); a second call goes on
    context.decode([5, 6], pos=[0, 3], seq_id=[1, 0])   # two sequences
    context.seen["attn_norm-1"]                         # one array for each ubatch, axes reversed
"""

import ctypes as C
import functools
import os
from pathlib import Path

import numpy as np

from tests.peers import ggml

ptr = C.c_void_p
EVAL = C.CFUNCTYPE(C.c_bool, ptr, C.c_bool, ptr)
LOG = C.CFUNCTYPE(None, C.c_int, C.c_char_p, ptr)
MODULE = "xllamacpp.abi3.so"


class ModelParams(C.Structure):
    """llama_model_params; what is not named here keeps the library's default."""

    _fields_ = [("devices", ptr), ("tensor_buft_overrides", ptr), ("n_gpu_layers", C.c_int32), ("split_mode", C.c_int),
                ("load_mode", C.c_int), ("lazy_mode", C.c_int), ("main_gpu", C.c_int32), ("tensor_split", ptr),
                ("progress_callback", ptr), ("progress_callback_user_data", ptr), ("kv_overrides", ptr),
                ("vocab_only", C.c_bool), ("check_tensors", C.c_bool), ("use_extra_bufts", C.c_bool),
                ("no_host", C.c_bool), ("no_alloc", C.c_bool), ("load_mtp", C.c_bool)]


class ContextParams(C.Structure):
    """llama_context_params."""

    _fields_ = [*((name, C.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq",
                                                  "n_outputs_max", "n_outputs_max_per_seq")),
                *((name, C.c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type",
                                                 "pooling_type", "attention_type", "flash_attn_type")),
                *((name, C.c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor",
                                                 "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")),
                ("yarn_orig_ctx", C.c_uint32), ("defrag_thold", C.c_float), ("cb_eval", EVAL),
                ("cb_eval_user_data", ptr), ("type_k", C.c_int), ("type_v", C.c_int), ("abort_callback", ptr),
                ("abort_callback_data", ptr), ("_newer", ptr),        # a member younger than the headers read for this
                *((name, C.c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full",
                                                "kv_unified")),
                ("samplers", ptr), ("n_samplers", C.c_size_t), ("ctx_other", ptr)]


class Batch(C.Structure):
    """llama_batch."""

    _fields_ = [("n_tokens", C.c_int32), ("token", C.POINTER(C.c_int32)), ("embd", ptr), ("pos", C.POINTER(C.c_int32)),
                ("n_seq_id", C.POINTER(C.c_int32)), ("seq_id", C.POINTER(C.POINTER(C.c_int32))),
                ("logits", C.POINTER(C.c_int8))]


SIGNATURES = {
    "backend_init": (None,), "log_set": (None, LOG, ptr),
    "model_default_params": (ModelParams,), "context_default_params": (ContextParams,),
    "model_load_from_file": (ptr, C.c_char_p, ModelParams), "model_free": (None, ptr),
    "init_from_model": (ptr, ptr, ContextParams), "free": (None, ptr),
    "model_get_vocab": (ptr, ptr), "vocab_n_tokens": (C.c_int32, ptr), "model_n_layer": (C.c_int32, ptr),
    "batch_init": (Batch, C.c_int32, C.c_int32, C.c_int32), "batch_free": (None, Batch),
    "decode": (C.c_int32, ptr, Batch), "get_logits_ith": (C.POINTER(C.c_float), ptr, C.c_int32),
    "get_embeddings_ith": (C.POINTER(C.c_float), ptr, C.c_int32), "get_memory": (ptr, ptr),
    "memory_seq_rm": (C.c_bool, ptr, C.c_int32, C.c_int32, C.c_int32),
    "memory_seq_cp": (None, ptr, C.c_int32, C.c_int32, C.c_int32, C.c_int32),
}


class LlamaError(RuntimeError):
    """llama.cpp refused a file or a batch; the message is what it logged."""


class Library:
    """The functions used, declared as ``llama_NAME``; ``ggml`` is the same module as a `tests.peers.ggml.Library`."""

    def __init__(self, path, mode):
        lib = C.CDLL(str(path), mode=mode)
        self.path = str(path)
        self.ggml = ggml.Library(lib)
        for name, (result, *arguments) in SIGNATURES.items():
            function = getattr(lib, f"llama_{name}", None)
            if function is None:
                raise ggml.PeerMissing(f"llama_{name} is not in {path}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        lib.ggml_get_name.restype, lib.ggml_get_name.argtypes = C.c_char_p, [ptr]
        self.name_of = lib.ggml_get_name
        self.logged = []
        self._log = LOG(lambda level, text, _: self.logged.append(text.decode(errors="replace")))
        self.log_set(self._log, None)
        self.backend_init()
        self._check_defaults()

    def _check_defaults(self):
        """The release's structs are as declared here: its defaults are found where they should lie."""
        model, context = self.model_default_params(), self.context_default_params()
        have = (model.main_gpu, model.use_extra_bufts, model.vocab_only, model.load_mtp, context.n_ctx, context.n_batch,
                context.n_threads, context.yarn_beta_slow, context.defrag_thold, context.type_k, context.type_v,
                context.embeddings, context.offload_kqv, context.swa_full, context.kv_unified, context.n_samplers)
        want = (0, True, False, False, 512, 2048, 4, -1, -1, 1, 1, False, True, True, False, 0)
        if have != want:
            raise ggml.PeerMissing(f"this release of llama.cpp has other parameter structs: {have}, expected {want}")

    def model(self, path):
        return Model(self, path)


class Model:
    """A model as the file holds it: on the CPU, nothing repacked."""

    def __init__(self, library, path):
        self.library, self.pointer = library, None
        params = library.model_default_params()
        params.n_gpu_layers, params.use_extra_bufts = 0, False
        library.logged.clear()
        self.pointer = library.model_load_from_file(os.fsencode(path), params)
        if not self.pointer:
            raise LlamaError("".join(library.logged[-5:]))
        self.n_vocab = library.vocab_n_tokens(library.model_get_vocab(self.pointer))
        self.n_layers = library.model_n_layer(self.pointer)

    def __del__(self):
        if getattr(self, "pointer", None):
            self.library.model_free(self.pointer)

    def context(self, watch=(), **params):
        """A context of F32 cache types; ``params`` are fields of llama_context_params."""
        return Context(self, watch, params)


class Context:
    """``seen`` holds what the nodes named in ``watch`` became, a list of arrays for each, one for every ubatch."""

    def __init__(self, model, watch, params):
        self.model, self.library, self.watch, self.pointer = model, model.library, set(watch), None
        self.seen = {name: [] for name in self.watch}
        self.ends = {}                  # sequence to its next position
        self.has_no_logits = bool(params.get("embeddings"))
        values = self.library.context_default_params()
        values.type_k = values.type_v = ggml.F32
        values.n_threads, values.n_threads_batch, values.flash_attn_type = 1, 1, 0
        self._callback = EVAL(self._look)
        if self.watch:
            values.cb_eval = self._callback
        for name, value in params.items():
            getattr(values, name)
            setattr(values, name, value)
        self.library.logged.clear()
        self.pointer = self.library.init_from_model(model.pointer, values)
        if not self.pointer:
            raise LlamaError("".join(self.library.logged[-5:]))

    def __del__(self):
        if getattr(self, "pointer", None):
            self.library.free(self.pointer)

    def _look(self, node, ask, _):
        name = self.library.name_of(node).decode()
        if name in self.watch and not ask:
            self.seen[name].append(ggml.Tensor(self.library_of_tensors, node).numpy().copy())
        return not ask or name in self.watch

    @property
    def library_of_tensors(self):
        return _Owner(self.library.ggml)

    def decode(self, tokens, pos=None, seq_id=0):
        """Logits (n, n_vocab) of n tokens; positions go on from the sequence's last unless they are given.

        None where the context is one of ``embeddings``, as models without logits need it.
        """
        n = len(tokens)
        seq_ids = np.broadcast_to(seq_id, n).tolist()
        batch = self.library.batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(tokens):
                at = self.ends.get(seq_ids[i], 0) if pos is None else int(pos[i])
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), at, 1, 1
                batch.seq_id[i][0] = seq_ids[i]
                self.ends[seq_ids[i]] = at + 1
            self.library.logged.clear()
            status = self.library.decode(self.pointer, batch)
        finally:
            self.library.batch_free(batch)
        if status:
            raise LlamaError(f"llama_decode returned {status}: {''.join(self.library.logged[-5:])}")
        if self.has_no_logits:
            return None
        return np.array([self.library.get_logits_ith(self.pointer, i)[:self.model.n_vocab] for i in range(n)], np.float32)

    def rollback(self, seq_id, position):
        """Forget what the sequence has from this position on; false where the memory cannot."""
        done = self.library.memory_seq_rm(self.library.get_memory(self.pointer), seq_id, position, -1)
        if done:
            self.ends[seq_id] = position
        return done

    def copy(self, source, target):
        self.library.memory_seq_cp(self.library.get_memory(self.pointer), source, target, -1, -1)
        self.ends[target] = self.ends[source]


class _Owner:
    """What `tests.peers.ggml.Tensor` needs of a context."""

    def __init__(self, library):
        self.library = library


@functools.cache
def load(everywhere=False):
    """The library from the wheel; PeerMissing if it is not there.  ``everywhere``: its symbols are the process's."""
    folder = ggml.folder_of("xllamacpp", "xllamacpp")
    return Library(Path(folder) / MODULE, C.RTLD_GLOBAL if everywhere else C.RTLD_LOCAL)
