"""Models in several files, as the gguf package and llama.cpp's gguf-split write them."""

import shutil

import gguf_models as models
import numpy as np
import pytest

from gdn.adapters.gguf import describe, inspect, read_layer


@pytest.fixture
def whole(tmp_path, rng):
    """(the model in one file, its parts)."""
    meta, tensors = models.model("kimi-k3", rng, S=16)
    path = models.write(tmp_path / "whole.gguf", "kimi-k3", meta, tensors)
    models.write(tmp_path / "split.gguf", "kimi-k3", meta, tensors, split_max_tensors=11)
    parts = sorted(tmp_path.glob("split-*"))
    assert len(parts) > 4 and parts[0].name == f"split-00001-of-{len(parts):05}.gguf"
    return path, parts


def test_parts_are_the_whole(whole):
    path, parts = whole
    for name in (parts[0], str(parts[0]), str(parts[0]).encode()):
        assert describe(name) == describe(path)
    for il in range(models.N_BLOCKS - 1):
        (w, config), (ref, expected) = read_layer(parts[0], il), read_layer(path, il)
        assert config == expected and set(w) == set(ref)
        for key in ref:
            np.testing.assert_array_equal(w[key], ref[key], err_msg=key)
    assert inspect(parts[0]).splitlines()[1:] == inspect(path).splitlines()[1:]


def test_only_the_first_part_opens(whole, tmp_path):
    path, parts = whole
    for part in parts[1:]:
        with pytest.raises(ValueError, match=f"one part of {len(parts)}.*expected the first"):
            read_layer(part, 0)
    renamed = shutil.copy(parts[0], tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=f"one part of {len(parts)}.*name that ends"):
        read_layer(renamed, 0)
    shutil.copy(parts[0], wrong := tmp_path / f"split-00001-of-{len(parts) + 1:05}.gguf")
    with pytest.raises(ValueError, match=f"one part of {len(parts)}"):
        read_layer(wrong, 0)


def test_missing_and_mistaken_parts_are_named(whole):
    _, parts = whole
    last, data = parts[-1], parts[-1].read_bytes()
    last.unlink()
    with pytest.raises(FileNotFoundError, match=last.name):
        read_layer(parts[0], 0)
    shutil.copy(parts[1], last)
    with pytest.raises(ValueError, match=rf"{last.name}: split.no and split.count are \[1, "):
        describe(parts[0])
    at = parts[1].read_bytes().index(b"split.no") + len(b"split.no") + 4
    twice = bytearray(parts[1].read_bytes())
    twice[at:at + 2] = (len(parts) - 1).to_bytes(2, "little")
    last.write_bytes(twice)
    with pytest.raises(ValueError, match=rf"{last.name}: .*blk.* in an earlier part too"):
        describe(parts[0])
    last.write_bytes(data)
    at = (first := bytearray(parts[0].read_bytes())).index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    first[at] += 1
    parts[0].write_bytes(first)
    with pytest.raises(ValueError, match=r"split.tensors.count is \d+, the parts have \d+"):
        describe(parts[0])


def test_damaged_parts_are_refused(whole, rng):
    """Cut or overwritten anywhere in the header, with the part's name; cut in its tensors by those who read them."""
    _, parts = whole
    part = parts[2]
    data = part.read_bytes()
    header = data.rindex(b"blk.") + 60
    for n in (*range(0, header, 29), len(data) - 1):
        part.write_bytes(data[:n])
        with pytest.raises(ValueError, match=part.name):
            describe(parts[0])
    for position in rng.integers(0, header, 200):
        damaged = bytearray(data)
        damaged[position] ^= int(rng.integers(1, 256))
        part.write_bytes(damaged)
        try:
            for il in range(models.N_BLOCKS - 1):
                read_layer(parts[0], il)
        except ValueError as error:
            assert str(part.parent / "split-") in str(error)
