"""What fuzzing kept in tests/corpus, and every count of it at the edges of its type under a checksum that fits: an answer or a
named error within a second, nothing written by a refused call."""

import subprocess
import time
import tracemalloc
from pathlib import Path

import pytest

import gdn
from gdn.adapters.gguf import describe, inspect, read_layer

TESTS = Path(__file__).parent
CORPUS = TESTS / "corpus"
EDGES = (2**31, 2**63 - 1, 2**64 - 1)


def replay(kind, folder):
    """The fuzzers' program over the files; it changes the words itself."""
    program = folder / kind
    subprocess.run(["cc", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-DREPLAY", f"-DFUZZ_{kind.upper()}",
                    f"-I{gdn.get_include()}", f"-I{TESTS.parent / 'gdn' / 'ring'}", TESTS / "c" / "fuzz_bytes.c", "-o", program,
                    gdn.get_library(), f"-Wl,-rpath,{Path(gdn.get_library()).parent}"], check=True)
    files = sorted((CORPUS / kind).iterdir())
    done = subprocess.run([program, *files], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"{len(files)} files\n"), done.stderr


def test_rings(tmp_path):
    replay("ring", tmp_path)


def test_saved_sequences(tmp_path):
    replay("saved", tmp_path)


def read(path):
    """No error but ValueError, no second, no memory that the file cannot name."""
    tracemalloc.start()
    started = time.process_time()
    for function in (describe, inspect, lambda path: read_layer(path, 0)):
        try:
            function(path)
        except ValueError:
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - started < 1 and peak < (4 << 20) + 64 * path.stat().st_size


@pytest.mark.parametrize("path", sorted((CORPUS / "gguf").iterdir()), ids=lambda path: path.name)
def test_gguf_files(tmp_path, path):
    data, spoiled = path.read_bytes(), tmp_path / "spoiled"
    describe(path)                              # what is imported when it is first asked for
    read(path)
    for at in range(8, min(len(data), 800), 7):
        for edge in EDGES:
            bent = bytearray(data)
            bent[at:at + 8] = edge.to_bytes(8, "little")[:len(data) - at]
            spoiled.write_bytes(bent)
            read(spoiled)


def test_it_stays_small():
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < 300_000
