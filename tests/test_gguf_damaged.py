"""GGUF files that are damaged or hostile: ValueError that names the file, never a crash, never much memory."""

import struct
import tracemalloc

import gguf_models as models
import pytest
from gguf_tools import FORMS, META, random_tensors, write

from gdn.adapters.gguf import describe, read_layer


def outcome(path, il=1):
    """Whether the file reads; any error other than ValueError fails the test that asks."""
    try:
        describe(path)
        read_layer(path, il)
    except ValueError as error:
        assert str(path) in str(error)
        return False
    return True


@pytest.fixture
def whole(tmp_path, rng):
    """A small whole file's bytes, the end of its header, and a path to put damaged copies in."""
    path = write(tmp_path / "whole.gguf", "qwen35", META | {"tokens": ["a", "bc"], "numbers": [1, 2, 3]},
                 random_tensors(FORMS["qwen35"], rng))
    data = path.read_bytes()
    assert outcome(path)
    header = data.rindex(b"blk.1.") + 80
    return data, header, tmp_path / "damaged.gguf"


def test_no_gguf_at_all(tmp_path):
    path = tmp_path / "x.gguf"
    with pytest.raises(FileNotFoundError):
        read_layer(path, 0)
    for data in (b"", b"G", b"GGUF", bytes(4096), b"GGUF" + bytes(4096), b"\xff" * 4096, b"GGUF" + b"\xff" * 4096):
        path.write_bytes(data)
        assert not outcome(path), data[:8]
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(ValueError, match="big-endian"):
        describe(path)
    with pytest.raises(ValueError, match="not a regular file"):
        describe(tmp_path)


def test_truncated_anywhere(whole):
    data, header, path = whole
    for n in [*range(0, header, 7), *range(header, len(data), 997), len(data) - 1]:
        path.write_bytes(data[:n])
        assert not outcome(path), f"read although cut to {n} of {len(data)} bytes"


def test_flipped_bytes_in_the_header(whole, rng):
    data, header, path = whole
    tracemalloc.start()
    refused = 0
    for position in rng.integers(0, header, 400):
        damaged = bytearray(data)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        refused += not outcome(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 100
    assert peak < 16 * len(data) + (8 << 20), f"{peak} bytes allocated for a file of {len(data)}"


@pytest.mark.parametrize("arch", ["kimi-k3", "bailingmoe3", "qwen4exp", "kimi-linear"])
def test_flipped_bytes_in_whole_models(tmp_path, rng, arch):
    bound = None if arch == "kimi-linear" else -5.0
    path = models.write(tmp_path / "x.gguf", arch, *models.model(arch, rng, S=16, bound=bound))
    data = path.read_bytes()
    keys, header = data.index(b"blk.0."), data.rindex(b"blk.3.") + 60
    refused = 0
    for position in (*rng.integers(0, keys, 150), *rng.integers(keys, header, 50)):
        damaged = bytearray(data)
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        refused += not outcome(path)
    assert refused > 50


def key_value(key, type, value):
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", type) + value


def tensor_info(name, ne, type=0, offset=0):
    return struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, type, offset)


HUGE = (1 << 64) - 1
HOSTILE = {
    "pairs": struct.pack("<QQ", 0, HUGE), "tensors": struct.pack("<QQ", HUGE, 0),
    "pairs that fit no file": struct.pack("<QQ", 0, 1 << 19) + bytes(1 << 16),
    "key length": struct.pack("<QQQ", 0, 1, HUGE), "empty key": struct.pack("<QQ", 0, 1) + key_value(b"", 0, b"\0"),
    "key bytes": struct.pack("<QQ", 0, 1) + key_value(b"\xff\xfe", 0, b"\0"),
    "string length": struct.pack("<QQ", 0, 1) + key_value(b"k", 8, struct.pack("<Q", HUGE)),
    "value type": struct.pack("<QQ", 0, 1) + key_value(b"k", 77, bytes(64)),
    "same key": struct.pack("<QQ", 0, 2) + key_value(b"k", 0, b"\0") * 2,
    "array length": struct.pack("<QQ", 0, 1) + key_value(b"k", 9, struct.pack("<IQ", 0, HUGE)),
    "array of doubles": struct.pack("<QQ", 0, 1) + key_value(b"k", 9, struct.pack("<IQ", 12, 1 << 61)),
    "array of strings": struct.pack("<QQ", 0, 1) + key_value(b"k", 9, struct.pack("<IQ", 8, 1 << 40) + bytes(4096)),
    "nested arrays": struct.pack("<QQ", 0, 1) + key_value(b"k", 9, struct.pack("<IQ", 9, 1) * 100000),
    "alignment 0": struct.pack("<QQ", 0, 1) + key_value(b"general.alignment", 4, struct.pack("<I", 0)),
    "alignment 33": struct.pack("<QQ", 0, 1) + key_value(b"general.alignment", 4, struct.pack("<I", 33)),
    "alignment text": struct.pack("<QQ", 0, 1) + key_value(b"general.alignment", 8, struct.pack("<Q", 1) + b"8"),
    "no axes": struct.pack("<QQ", 1, 0) + tensor_info(b"blk.0.ssm_a", ()),
    "nine axes": struct.pack("<QQ", 1, 0) + tensor_info(b"blk.0.ssm_a", (1,) * 9),
    "extents": struct.pack("<QQ", 1, 0) + tensor_info(b"blk.0.ssm_a", (HUGE,) * 4),
    "extents that wrap to 0": struct.pack("<QQ", 1, 0) + tensor_info(b"blk.0.ssm_a", (1 << 32,) * 4),
    "offset": struct.pack("<QQ", 1, 0) + tensor_info(b"blk.0.ssm_a", (1,), 0, HUGE - 31),
    "odd offset": struct.pack("<QQ", 1, 0) + tensor_info(b"blk.0.ssm_a", (1,), 0, 3),
    "same tensor": struct.pack("<QQ", 2, 0) + tensor_info(b"blk.0.ssm_a", (1,)) * 2,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_header(tmp_path, what):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + HOSTILE[what] + bytes(4096))
    tracemalloc.start()
    with pytest.raises(ValueError) as caught:
        describe(path)
    assert "general.architecture" not in str(caught.value)      # refused for what is wrong, not for what is left out
    assert not outcome(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_unknown_type_of_the_layers_own_tensor(whole):
    data, _, path = whole
    at = data.index(b"blk.1.attn_gate.weight") + len(b"blk.1.attn_gate.weight") + 4 + 2 * 8
    for type in (4, 31, 1000, (1 << 32) - 1):
        path.write_bytes(data[:at] + struct.pack("<I", type) + data[at + 4:])
        with pytest.raises(ValueError, match=r"blk\.1\.attn_gate\.weight: type"):
            read_layer(path, 1)
        assert "unknown" in describe(path)[0]["types"]
