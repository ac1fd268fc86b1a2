"""The plug-in of ggml and llama.cpp: a backend for linear-attention layers that an unmodified build loads.

A program of its own loads it by itself::

    GGML_BACKEND_PATH=$(python -m gdn llama --path) llama-server -m model.gguf

A ggml that lives in this process gets it from `register`.
"""

import ctypes
import os

import gdn

COUNTED = ("delta", "delta_norms", "delta_gathers", "delta_copies", "conv", "conv_windows", "host_graphs")


class Backend:
    """A registered plug-in: ``pointer`` is its ggml_backend_reg_t."""

    def __init__(self, pointer, counts):
        self.pointer, self._counts = pointer, counts

    def counts(self):
        """How often what was run since it was loaded, a dict of integers: GATED_DELTA_NET (``delta``; with the norms, the
        gather of states, the copy back done by the same call), SSM_CONV (``conv``; with windows taken from the cache and
        kept there), and graphs given to ggml's CPU backend."""
        values = (ctypes.c_int64 * len(COUNTED))()
        self._counts(values)
        return dict(zip(COUNTED, values, strict=True))


def register(library, path=None):
    """Load the plug-in into a ggml of this process: the `Backend`.  Models loaded and contexts made after that use it.

    library     a ctypes.CDLL, or a path of one that is loaded: whatever exports ggml_backend_load (llama.cpp's libggml, or
                an extension module that holds all of it, as the wheel xllamacpp's does)
    path        the plug-in, gdn.get_ggml_backend() if None

    Raises RuntimeError where ggml refuses it (its log says why), ValueError for a library without ggml_backend_load.
    """
    lib = library if isinstance(library, ctypes.CDLL) else ctypes.CDLL(os.fspath(library))
    path = os.fspath(gdn.get_ggml_backend() if path is None else path)
    try:
        load, find = lib.ggml_backend_load, lib.ggml_backend_reg_get_proc_address
    except AttributeError:
        raise ValueError(f"library: {lib._name} does not export ggml_backend_load") from None
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
    pointer = load(os.fsencode(path))
    counts = find(pointer, b"gdn_ggml_counts") if pointer else None
    if not counts:
        raise RuntimeError(f"ggml did not take {path} as a backend of gdn: its log says why")
    return Backend(pointer, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(counts))
