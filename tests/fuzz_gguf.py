"""Random GGUF files through the reader: `make fuzz-bytes` runs this with atheris, with libFuzzer's arguments.

Any error but a ValueError, a call over a second or memory beyond what a file of that size can name ends it.
"""

import sys
import tempfile
import tracemalloc
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gdn.adapters", "gdn.layer_config", "gdn.weight_layouts"]):
    from gdn.adapters.gguf import describe, inspect, read_layer

PATH = Path(tempfile.mkdtemp(), "file.gguf")
EDGES = [0, 1, 2, 7, 2**16, 2**20, 2**28, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
SLACK = 4 << 20       # bytes: what reading any file at all may take


def read(data):
    PATH.write_bytes(data)
    for function in (describe, inspect, lambda path: read_layer(path, 0), lambda path: read_layer(path, 1)):
        tracemalloc.start()
        try:
            function(PATH)
        except ValueError:
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < SLACK + 64 * len(data), f"{peak} bytes for a file of {len(data)}"


def mutate(data, max_size, seed):
    """Counts, lengths, offsets and types are words of 4 or 8 bytes anywhere: one becomes a value at an edge."""
    if seed % 2 or len(data) < 24:
        return atheris.Mutate(data, max_size)
    data, size = bytearray(data), 8 if seed & 2 else 4
    at = (seed >> 8) % (min(len(data), 2048) - size)
    data[at:at + size] = (EDGES[(seed >> 3) % len(EDGES)] % 256**size).to_bytes(size, "little")
    return bytes(data)


if __name__ == "__main__":
    atheris.Setup(sys.argv, read, custom_mutator=mutate)
    atheris.Fuzz()
