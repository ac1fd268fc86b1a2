"""Where the headers lie and how the library was built."""

import platform
from pathlib import Path

import numpy

from gdn import _core
from gdn._version import __version__

__all__ = ["get_ggml_backend", "get_include", "get_library", "show_config"]


def get_include():
    """Directory of ``gdn.h``, for a C compiler's ``-I``."""
    return str(Path(__file__).parent / "include")


def get_library():
    """Path of ``libgdn.so``, the library for hosts without Python.  FileNotFoundError where this build has none."""
    return native("libgdn.so")


def get_ggml_backend():
    """Path of ``libggml-gdn.so``, the plug-in of ggml and llama.cpp.  FileNotFoundError where this build has none."""
    return native("libggml-gdn.so")


def native(name):
    path = Path(__file__).parent / "lib" / name
    if not path.is_file():
        raise FileNotFoundError(f"this build of gdn has no {name}: it is made on Linux, by builds that are not for debugging")
    return str(path)


def show_config(mode="print"):
    """Print version, instruction-set level, threads and how the library was built.

    ``mode="dicts"`` returns the same as a dict instead.  ValueError for any other mode.
    """
    if mode not in ("print", "dicts"):
        raise ValueError(f"mode must be 'print' or 'dicts', got {mode!r}")
    config = {
        "version": __version__,
        **_core.build_record(),
        "threads": _core.get_num_threads(),
        "processor": processor(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "include": get_include(),
    }
    if mode == "dicts":
        return config
    for name, value in config.items():
        print(f"{name.replace('_', ' '):<13} {value}")
    return None


def processor():
    """The processor's name as the system gives it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
