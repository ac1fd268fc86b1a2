"""The ring from C: the example programs, and the table's ring members called without Python in between."""

import ctypes
import os
import subprocess
import sys
import sysconfig
from ctypes import byref, c_int64, c_size_t
from pathlib import Path

import numpy as np
import pytest
from c_tools import (
    ABI,
    BUSY,
    DAMAGED,
    FULL,
    NULL,
    OK,
    ROLLBACK,
    ROW,
    SCRATCH,
    SHAPE,
    STRIDE,
    UNKNOWN,
    VALUE,
    Api,
    Params,
    StepArgs,
    Tensor,
    check_null,
    numbers,
)
from ring_tools import EXTENTS, fields

import gdn

EXAMPLES = Path(__file__).parent.parent / "examples" / "c_host"


# ---------------------------------------------------------------- the examples

@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The examples, compiled with -Wall -Wextra -Werror."""
    build = tmp_path_factory.mktemp("c_host")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(gdn.__file__).parent.parent), *sys.path])}
    subprocess.run(["make", "-s", "-C", EXAMPLES, f"PYTHON={sys.executable}", f"BUILD={build}"], check=True,
                   env=environment)
    return build, environment


@pytest.mark.parametrize("name", ["threads", "library/threads"])
def test_pthreads_decode_on_memory_that_c_owns(programs, name):
    build, environment = programs
    done = subprocess.run([build / name], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("error") == 8 and done.stdout.endswith("ok\n")


@pytest.mark.parametrize("name", ["shared", "library/shared"])
def test_python_and_c_share_a_ring(programs, name):
    build, environment = programs
    done = subprocess.run([sys.executable, EXAMPLES / "shared.py", build / name], env=environment,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as it should be") == 8 and "resource_tracker" not in done.stderr


# ---------------------------------------------------------------- the table

def step_args(ids, sizes, positions=None, n_snapshots=3):
    s = StepArgs(ctypes.sizeof(StepArgs), 0, len(ids), n_snapshots, numbers(*ids), numbers(*sizes),
                 None if positions is None else numbers(*positions), numbers(*[0] * len(ids)),
                 numbers(*[0] * (len(ids) * n_snapshots)))
    return s


class CRing:
    """A ring of 3 slots and 2 tokens of rollback through the table alone."""

    def __init__(self):
        self.api = Api.from_address(gdn.capi)
        assert self.api.size == ctypes.sizeof(Api)
        self.params = Params(ctypes.sizeof(Params), 3, 2, EXTENTS["n_layers"], EXTENTS["H_v"], EXTENTS["S_k"],
                             EXTENTS["S_v"], EXTENTS["conv_channels"], EXTENTS["conv_width"], -1)
        n = c_size_t()
        assert self.api.ring_size(byref(self.params), byref(n)) == OK
        self.buffer = np.full(n.value // 4 + 1, np.nan, np.float32)
        self.nbytes, self.at = n.value, self.buffer.ctypes.data
        assert self.api.ring_init(byref(self.params), self.at, self.nbytes) == OK
        assert self.api.ring_attach(self.at, self.nbytes) == OK

    def __getattr__(self, name):
        return lambda *args: getattr(self.api, f"ring_{name}")(self.at, *args)

    def ask(self, name, *args, type=c_int64):
        value = type()
        assert getattr(self, name)(*args, byref(value)) == OK
        return value.value


@pytest.fixture
def ring():
    return CRing()


def test_every_ring_function(ring):
    slot = c_int64(2)
    assert ring.acquire(5, byref(slot)) == OK and slot.value == 2
    assert ring.acquire(6, None) == OK
    step = step_args([5, 6], [2, 7])
    assert ring.begin(byref(step)) == OK and step.failed == -1 and step.step != 0
    assert step.rows_in[:2] == [2, 0] and step.rows_out[:6] == [8, 5, -1, 9, 6, 3]
    assert ring.begin(byref(step_args([6], [1]))) == BUSY
    assert ring.commit(byref(step)) == OK and step.step == 0
    assert ring.commit(byref(step)) == VALUE and ring.abort(byref(step)) == VALUE
    assert ring.ask("position", 5) == 2 and ring.ask("max_rollback", 6) == 2
    assert ring.rollback(6, 2) == OK and ring.rollback(6, 1) == ROLLBACK and ring.rollback(6, -1) == VALUE
    assert ring.ask("position", 6) == 5 and ring.ask("max_rollback", 6) == 0
    assert ring.copy(5, 7) == OK and ring.copy(5, 8) == FULL and ring.copy(5, 6) == BUSY
    size = ring.ask("save_size", 5, type=c_size_t)
    data, written = ctypes.create_string_buffer(size), c_size_t()
    assert ring.save(5, data, size - 1, byref(written)) == SCRATCH
    assert ring.save(5, data, size, byref(written)) == OK and written.value == size
    assert ring.release(7) == OK and ring.release(7) == UNKNOWN
    assert ring.load(9, data, size - 1) == DAMAGED and ring.load(9, data, size) == OK
    assert ring.load(9, data, size) == BUSY
    assert ring.ask("max_rollback", 9) == ring.ask("max_rollback", 5) == 2
    assert ring.reset(5) == OK and ring.ask("position", 5) == 0
    step = step_args([9, 5], [1, 1], [0, -1])
    assert ring.begin(byref(step)) == OK and step.rows_in[0] == -1 and ring.abort(byref(step)) == OK
    t = Tensor()
    for name, ne in (("ssm", [4, 3, 2, 12]), ("conv", [3, 5, 1, 12])):
        assert getattr(ring, name)(1, byref(t)) == OK and list(t.ne) == ne and t.data % 64 == 0
        assert getattr(ring, name)(2, byref(t)) == ROW
    assert gdn.StateRing(ring.buffer).seq_ids == [6, 9, 5]     # and Python sees the same ring


def test_refusals(ring):
    api, n, slot = ring.api, c_size_t(), c_int64(7)
    assert ring.acquire(1, byref(slot)) == ROW and ring.acquire(-1, None) == VALUE
    assert ring.acquire(1, None) == OK and ring.acquire(1, None) == BUSY
    before = fields(ring.buffer)[1].copy()
    for step, status, failed in (
            (step_args([1, 2], [1, 1]), UNKNOWN, 1), (step_args([1, 1], [1, 1]), BUSY, 1),
            (step_args([1], [-1]), VALUE, 0), (step_args([1], [1], [4]), VALUE, 0),
            (step_args([1], [1], [-2]), VALUE, 0),
            (step_args([1], [3], n_snapshots=2), SHAPE, 0), (step_args([1], [0], n_snapshots=0), SHAPE, -1)):
        assert (ring.begin(byref(step)), step.failed, step.step) == (status, failed, 0)
        assert (fields(ring.buffer)[1] == before).all()
    short = step_args([1], [1])
    short.size = 64
    assert ring.begin(byref(short)) == ring.commit(byref(short)) == ABI
    for name, value, status in (("size", 4, ABI), ("n_slots", 0, VALUE), ("n_rollback", -1, VALUE), ("H_v", 0, VALUE),
                                ("conv_width", 0, VALUE), ("spare", -2, VALUE), ("n_layers", 2**31 - 1, OK),
                                ("n_slots", 2**28 + 1, VALUE)):
        p = Params.from_buffer_copy(ring.params)
        setattr(p, name, value)
        assert api.ring_size(byref(p), byref(n)) == status
    assert api.ring_init(byref(ring.params), ring.at, ring.nbytes - 1) == SHAPE
    assert api.ring_init(byref(ring.params), ring.at + 2, ring.nbytes) == STRIDE
    assert api.ring_attach(ring.at + 1, ring.nbytes) == STRIDE
    assert api.ring_attach(ring.at + 4, ring.nbytes - 4) == DAMAGED
    assert (fields(ring.buffer)[1] == before).all()
    assert [api.status_string(s) for s in range(20)].count(b"unknown status") == 1


@pytest.mark.parametrize("name", [name for name, _ in Api._fields_ if name.startswith("ring_")])
def test_null_arguments(ring, name):
    assert ring.acquire(1, None) == OK
    data, size, number = ctypes.create_string_buffer(1000), c_size_t(), c_int64(-1)
    at, step, one = (ring.at,), (ring.at, step_args([1], [1])), (ring.at, 1)
    arguments = {"size": (ring.params, size), "init": (ring.params, ring.at, ring.nbytes), "attach": (*at, ring.nbytes),
                 "acquire": (*at, 2, number), "begin": step, "commit": step, "abort": step, "rollback": (*one, 0),
                 "copy": (*one, 3), "position": (*one, number), "max_rollback": (*one, number), "save_size": (*one, size),
                 "save": (*one, data, len(data), size), "load": (*one, data, len(data)), "conv": (*one, Tensor()),
                 "ssm": (*one, Tensor()), "log": (*one, Tensor(), Tensor(), Tensor(), Tensor()),
                 "accept": (*one, numbers(0), 1), "copy_state": (*one, 3), "save_state_size": (*one, size),
                 "save_state": (*one, data, len(data), size)}
    check_null(getattr(ring.api, name), arguments.get(name[5:], one), (2,) if name == "ring_acquire" else ())


@pytest.mark.parametrize("name", ["seq_ids", "n_tokens", "rows_in", "rows_out"])
def test_a_step_of_null_arrays(ring, name):
    assert ring.acquire(1, None) == OK
    step = step_args([1], [1])
    setattr(step, name, None)
    assert ring.begin(byref(step)) == NULL and step.step == 0
    step.n_seqs = 0
    assert ring.begin(byref(step)) == OK


def test_an_id_table_that_lies(ring):
    """It follows from the records: whatever it says, attaching makes it anew."""
    ids = [3, 2**40, -7]
    for seq_id in ids:
        assert ring.acquire(seq_id, None) == OK
    start = int(fields(ring.buffer)[0]["ids_offset"][0])
    table = ring.buffer.view(np.int32)[start // 4:start // 4 + 16]
    for value in (0, 1, 2, 3, -1, -2**31, 2**31 - 1):
        table[:] = value
        assert ring.attach(ring.nbytes) == OK
        for i, seq_id in enumerate(ids):
            assert ring.ask("position", seq_id) == 0
            assert fields(ring.buffer)[1]["seq_id"][i] == seq_id
        assert ring.position(4, byref(c_int64())) == UNKNOWN


def test_the_embedding_page_compiles(tmp_path):
    """The C on docs/EMBEDDING.md, in order, as one function."""
    page = (EXAMPLES.parents[1] / "docs" / "EMBEDDING.md").read_text()
    code = [block.split("```")[0] for block in page.split("```c\n")[1:]]
    assert len(code) == 3
    source = tmp_path / "page.c"
    source.write_text('#define _GNU_SOURCE\n#include <Python.h>\n#include <sys/mman.h>\n#include "gdn.h"\n'
                      "extern gdn_tensor q, k, v, g, beta;\nextern void *scratch_of(size_t size);\n"
                      "int page(void);\nint page(void)\n{\n" + "".join(code)
                      + "return state != NULL;\n}\n")
    subprocess.run(["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{gdn.get_include()}",
                    f"-I{sysconfig.get_path('include')}", source], check=True)
