"""The C of the measurements, compiled when it is needed."""

import ctypes
import os
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def built(source, *flags):
    """The path of a shared library made of a file of this folder, for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, Path(source).stem + ".so")
        subprocess.run([os.environ.get("CC", "cc"), "-O3", "-march=native", "-shared", "-fPIC", *flags,
                        Path(__file__).with_name(source), "-ldl", "-o", library], check=True)
        yield library


def load(source, *flags):
    with built(source, *flags) as library:
        return ctypes.CDLL(str(library))
