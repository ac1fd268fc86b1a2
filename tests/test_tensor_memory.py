"""gdn.Tensor and memory: who keeps it alive, who may write it, how it is handed on."""

import ctypes
import gc
import hashlib
import io
import mmap
import sys
import weakref
from functools import partial

import numpy as np
import pytest
from helpers import optional
from tensor_tools import Crafted, Legacy, Modern, as_array, fit, ramp, same_memory, to_c

import gdn

# ---------------------------------------------------------------- life and death


class Block(bytearray):
    """Memory that can be watched."""


def test_views_keep_the_memory_alive():
    block = Block(ramp(12).tobytes())
    alive = weakref.ref(block)
    t = gdn.Tensor(block)
    views = [t.view((3, 4)).transpose().slice(0, 1, 3), memoryview(t), np.from_dlpack(t), t.numpy(),
             np.asarray(t)[..., ::2], t.__dlpack__(), t.__dlpack__(max_version=(1, 0)), gdn.Tensor(t, owner=[]),
             as_array(t), fit(t, 1)]
    del block, t
    while views:
        gc.collect()
        assert alive() is not None
        assert bytes(alive()[4:8]) == np.float32(1).tobytes()
        view = views.pop(0)
        if isinstance(view, gdn.Tensor) and view.ne[0] == 2:
            np.testing.assert_array_equal(view.numpy()[0, 0], ramp(4, 3).T[:, 1:3])
        del view
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("wrap", [Modern, Legacy])
def test_dlpack_memory_is_sourceback(wrap):
    a = ramp(12).view()
    base = a.base
    del a
    before = sys.getrefcount(base)
    t = gdn.Tensor(wrap(base))
    held = t.slice(0, 1, 3).numpy()
    del t
    assert sys.getrefcount(base) == before + 1
    np.testing.assert_array_equal(held.ravel(), [1, 2])
    del held
    assert sys.getrefcount(base) == before


def test_owner_of_an_address_lives_as_long_as_the_last_view():
    class Owner:
        pass
    owner, a = Owner(), ramp(4)
    gone = []
    weakref.finalize(owner, gone.append, True)
    t = gdn.Tensor(a.ctypes.data, (4,), owner=owner)
    view = t.slice(0, 1, 2).numpy()
    owner.cycle = t
    del owner, t
    gc.collect()
    assert not gone
    del view
    gc.collect()
    assert gone


def test_a_buffer_in_use_cannot_be_resized():
    block = bytearray(16)
    t = gdn.Tensor(block).slice(0, 0, 1)
    with pytest.raises(BufferError):
        block.append(1)
    del t
    block.append(1)


def test_refusals_hold_nothing():
    block = bytearray(18)
    for arguments in [dict(), dict(ne=(5,)), dict(ne=(-1,)), dict(ne=(4,), offset=4), dict(ne=(4,), nb=())]:
        with pytest.raises(ValueError):
            gdn.Tensor(block, **arguments)
    with pytest.raises(TypeError):
        as_array(block)
    t = gdn.Tensor(block, (4,), owner=block)
    refusals = [(t.view, (5,), ()), (t.slice, 0, 1, 9), (t.reshape, (5,)), (t.permute, 0, 0, 0, 0), (fit, t, 0),
                (hashlib.md5, t.view((2, 2)).transpose()), (partial(t.__dlpack__, stream=1),)]
    before = sys.getrefcount(t)
    for refused, *arguments in refusals:
        with pytest.raises((ValueError, BufferError, TypeError)):
            refused(*arguments)
    assert sys.getrefcount(t) == before
    del t, refused, arguments, refusals
    gc.collect()
    block.append(1)


def test_tensors_can_be_weakly_referenced_but_not_pickled():
    t = gdn.Tensor(ramp(4))
    assert weakref.ref(t)() is t
    with pytest.raises(TypeError):
        t.__reduce__()
    with pytest.raises(TypeError):
        gdn.Tensor.__new__(gdn.Tensor)


# ---------------------------------------------------------------- read-only, unaligned, huge


def read_only(a):
    a.flags.writeable = False
    return a


@pytest.mark.parametrize("data", [
    ramp(4).tobytes(), read_only(ramp(4)), memoryview(ramp(4)).toreadonly(), Modern(gdn.Tensor(read_only(ramp(4))))],
    ids=["bytes", "array", "memoryview", "DLPack"])
def test_read_only_data(data):
    t = gdn.Tensor(data).view((2, 2)).transpose()
    a = t.numpy()
    assert not a.flags.writeable
    with pytest.raises(ValueError):
        a.flags.writeable = True
    with pytest.raises(ValueError):
        a[...] = 1
    assert memoryview(t).readonly
    with pytest.raises(TypeError):
        (ctypes.c_float * 4).from_buffer(t.permute(1, 0, 2, 3))
    with pytest.raises(TypeError):
        io.BytesIO(bytes(16)).readinto(gdn.Tensor(data))
    with pytest.raises(BufferError, match="read-only"):
        t.__dlpack__()
    owned = gdn.Tensor(gdn.Tensor(data), owner=[])          # one more owner changes neither what may be written
    assert memoryview(owned).readonly
    with pytest.raises(ValueError, match="of a memory that has bytes 0 to 16"):      # nor where the memory ends
        owned.view((5,))
    assert "read-only" in repr(t)
    assert not gdn.Tensor(Modern(t)).numpy().flags.writeable
    assert gdn.Tensor(Legacy(t.cont())).numpy().flags.writeable
    assert t.__dlpack__(copy=True)
    for source in (data, t) if not isinstance(data, bytes) else (t,):
        as_array(source)
        with pytest.raises(ValueError, match="q .*read-only"):
            as_array(source, writable=True)


def test_unaligned_memory_can_be_viewed_but_not_computed_on():
    block = bytearray(64)
    block[1:17] = ramp(4).tobytes()
    t = gdn.Tensor(block, (4,), offset=1)
    np.testing.assert_array_equal(t.numpy().ravel(), ramp(4))
    np.testing.assert_array_equal(t.cont().numpy().ravel(), ramp(4))
    assert not t.numpy().flags.aligned
    with pytest.raises(ValueError, match="q must have an address"):
        as_array(t)
    for offset in (1, 2):
        with pytest.raises(BufferError, match="address"):
            gdn.Tensor(block, (3,), offset=offset).__dlpack__()
    four = gdn.Tensor(block, (4,), offset=4)
    assert as_array(four).ctypes.data == four.data
    for a in (np.frombuffer(bytes(17), np.uint8)[1:].view(np.float32), np.zeros(4, "f4,u1")["f0"]):
        with pytest.raises(ValueError, match="q must have an address"):
            as_array(a)
    with pytest.raises(BufferError, match="strides"):
        gdn.Tensor(block, (4,), (6,)).__dlpack__()
    with pytest.raises(ValueError, match="strides"):
        as_array(gdn.Tensor(block, (4,), (6,)))
    as_array(gdn.Tensor(block, (1,), (6,)))               # a stride nobody takes
    assert np.from_dlpack(gdn.Tensor(block, (1,), (6,))).size == 1


def test_beyond_two_to_the_31_elements(tmp_path):
    n = (1 << 31) + 3
    with open(tmp_path / "sparse", "w+b") as file:
        file.truncate(4 * n)
        memory = mmap.mmap(file.fileno(), 4 * n)
    t = gdn.Tensor(memory)
    assert t.ne == (n, 1, 1, 1) and t.nbytes == 4 * n
    memory[4 * (n - 1):] = np.float32(5).tobytes()
    assert t.numpy()[0, 0, 0, n - 1] == 5
    assert t.slice(0, n - 1, n).numpy().item() == 5
    rows = t.view((1 << 16, (1 << 15)), offset=12).slice(1, (1 << 15) - 1, 1 << 15)
    assert rows.numpy()[0, 0, 0, -1] == 5 and rows.data == t.data + 4 * (n - (1 << 16))
    assert t.view((2,), (4 * (n - 1),)).numpy()[0, 0, 0].tolist() == [0, 5]
    assert np.from_dlpack(t)[0, 0, 0, -1] == 5 and memoryview(t)[0, 0, 0, n - 1] == 5
    c = to_c(fit(t, 1))
    assert (c.ne[0], c.nb[1]) == (n, 4 * n)
    with pytest.raises(ValueError, match="memory"):
        t.view((n + 1,))


# ---------------------------------------------------------------- array, buffer and DLPack out


def test_array_protocol():
    t = gdn.Tensor(ramp(2, 3))
    assert np.shares_memory(np.asarray(t), t.numpy())
    assert np.shares_memory(t.__array__(), t.numpy())
    assert np.shares_memory(t.__array__(np.float32, copy=False), t.numpy())
    assert not np.shares_memory(t.__array__(copy=True), t.numpy())
    assert t.__array__(np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy"):
        t.__array__(np.float64, copy=False)


def test_buffer_requests():
    t = gdn.Tensor(ramp(2, 3))
    view = memoryview(t)
    assert (view.shape, view.strides, view.format, view.readonly) == ((1, 1, 2, 3), (24, 24, 12, 4), "f", False)
    assert bytes(t) == ramp(2, 3).tobytes()
    assert bytes(t.transpose()) == ramp(2, 3).T.tobytes()
    (ctypes.c_float * 6).from_buffer(t)[5] = 50
    assert t.numpy()[0, 0, 1, 2] == 50
    assert hashlib.md5(t).digest() == hashlib.md5(bytes(t)).digest()          # a plain request for bytes
    with pytest.raises(BufferError, match="contiguous"):
        hashlib.md5(t.transpose())
    assert io.BytesIO(bytes(24)).readinto(t) == 24 and not t.numpy().any()


def test_dlpack_out():
    a = ramp(4, 5, 6)[::-1, 1:, ::2]
    t = gdn.Tensor(a)
    assert t.__dlpack_device__() == (1, 0)
    for source in (t, Legacy(t)):
        back = np.from_dlpack(source)
        np.testing.assert_array_equal(back[0], a)
        assert np.shares_memory(back, a)
        same_memory(gdn.Tensor(source), a)
    assert '"dltensor"' in repr(t.__dlpack__()) and '"dltensor"' in repr(t.__dlpack__(max_version=(0, 8)))
    assert "dltensor_versioned" in repr(t.__dlpack__(max_version=(1, 1), dl_device=(1, 0), copy=False))
    assert np.from_dlpack(gdn.Tensor(np.arange(3, dtype="i4"), type="i32")).dtype == np.int32
    halves = np.arange(24, dtype="f2").reshape(2, 3, 4)[:, ::-1, ::2]
    assert np.array_equal(np.from_dlpack(gdn.Tensor(halves, type="f16"))[0], halves)
    for options in [dict(dl_device=(2, 0)), dict(dl_device=(1, 1)), dict(stream=3)]:
        with pytest.raises(BufferError):
            t.__dlpack__(**options)


class Copied(Modern):
    def __dlpack__(self, **options):
        return self.data.__dlpack__(**options, copy=True)


def test_dlpack_copy_is_independent():
    a = ramp(5)
    t = gdn.Tensor(Copied(gdn.Tensor(a)))
    t.numpy()[...] = 0
    np.testing.assert_array_equal(a, ramp(5))


def test_dlpack_flags():
    """Bit 0 read-only, bit 1 a copy."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    for data, copied, flags in ((ramp(4), False, 0), (ramp(4), True, 2), (ramp(4).tobytes(), False, 1)):
        capsule = gdn.Tensor(data).__dlpack__(max_version=(1, 0), copy=copied)
        assert ctypes.c_uint64.from_address(get(capsule, b"dltensor_versioned") + 24).value == flags


def test_dlpack_of_other_producers():
    a = ramp(7)
    same_memory(gdn.Tensor(Crafted(a, (2, 3))), a[1:].reshape(2, 3))
    assert as_array(Crafted(a, (2, 3))).tolist() == [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(TypeError, match="data holds float32, type says f32"):
        gdn.Tensor(Crafted(a, (3,), lanes=2))


def test_dlpack_on_another_device():
    there = Modern(ramp(4))
    there.device = (2, 0)
    with pytest.raises(ValueError, match="CPU"):
        gdn.Tensor(there)
    with pytest.raises(ValueError, match="q must be in CPU"):
        as_array(there)


def test_dlpack_that_cannot_be_shared():
    with pytest.raises(ValueError, match="q cannot be shared through DLPack"):
        as_array(Legacy(gdn.Tensor(ramp(4).tobytes())))


def test_dlpack_bf16_round_trip():
    bits = np.array([0x3f80, 0x4000], np.uint16)
    t = gdn.Tensor(bits, type="bf16")
    back = gdn.Tensor(Modern(t), type="bf16")
    assert back.data == t.data and back.type == "bf16"
    with pytest.raises(TypeError, match="bfloat16"):
        as_array(Modern(t))


def test_torch():
    torch = optional("torch")
    x = torch.zeros(2, 3, 4)
    t = gdn.Tensor(x)
    assert t.ne == (4, 3, 2, 1) and t.data == x.data_ptr()
    as_array(x, writable=True)[1, 2, 3] = 7
    assert x[1, 2, 3] == 7 and torch.from_dlpack(t)[0, 1, 2, 3] == 7
    y = x.transpose(0, 2)[1:]
    same_memory(gdn.Tensor(y), np.asarray(y.numpy()))
    same_memory(gdn.Tensor(torch.from_dlpack(t.permute(2, 0, 1, 3))), t.permute(2, 0, 1, 3).numpy())
    assert as_array(torch.zeros(1, 2, 1, 2, 1)).shape == (1, 2, 1, 2, 1)
    assert torch.from_dlpack(gdn.Tensor(np.array([0x3f80], np.uint16), type="bf16")).float().item() == 1
    with pytest.raises(TypeError, match="float64"):
        as_array(x.double())
    with pytest.raises(ValueError, match="q .*grad"):
        as_array(torch.zeros(2, requires_grad=True))
