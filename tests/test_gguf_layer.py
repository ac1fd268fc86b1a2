"""Layers loaded from GGUF files against the same layers loaded from transformers' weights."""

import numpy as np
import pytest
from helpers import DATA, assert_close
from layer_cases import Case, family_class, one_sequence, state_of
from test_gguf import FORMS, KIMI_META, META, kimi_tensors, random_tensors, write

import gdn

PARTS = [70, 1, 1, 3]


@pytest.fixture(params=["qwen3next", "qwen35", "kimi"])
def pair(request, tmp_path):
    """The case with transformers' weights, and the same with the file's."""
    name = request.param
    path = DATA / f"{name}.gguf"
    ours, theirs = Case(name), Case(name)
    if name == "kimi":
        meta = KIMI_META | {"embedding_length": 64, "kda.head_dim": 32}
        path = write(tmp_path / "kimi.gguf", "kimi-linear", meta, kimi_tensors(theirs.data))
    ours.layer = family_class(name).from_gguf(path, 1)
    return ours, theirs


def test_outputs_and_states(pair):
    ours, theirs = pair
    assert {**ours.layer.extents, "head_map": None} == {**theirs.layer.extents, "head_map": None}      # a file may be tiled
    outputs, states = [], []
    for case in pair:
        ring = case.ring()
        outputs.append(one_sequence(ring, case, PARTS))
        states.append(state_of(ring, 7)[0])
    assert_close(outputs[0], outputs[1], "output")
    assert_close(outputs[0], theirs.y, "output against transformers")
    # The file's tiled heads in transformers' order: old head kh * r + ri is new head ri * H_k + kh.
    H_k, H_v = ours.layer.H_k, ours.layer.H_v
    tiled = ours.layer.head_map == "tiled" and H_v > H_k
    order = np.arange(H_v).reshape(H_v // H_k, H_k).T.ravel() if tiled else np.arange(H_v)
    assert_close(states[0][order], states[1], "state")


def test_described_bytes_are_the_rings(tmp_path, rng):
    """One plane, one slot: the ring's rows are as large as `describe` says."""
    path = write(tmp_path / "x.gguf", "qwen35", META, random_tensors(FORMS["qwen35"], rng))
    layer = gdn.GatedDeltaNet.from_gguf(path, 1)
    ring = gdn.StateRing.create(1, n_layers=1, **layer.extents)
    described, = gdn.adapters.gguf.describe(path)
    assert ring.ssm(0).numpy()[0].nbytes == described["ssm_bytes"]
    assert ring.conv(0).numpy()[0].nbytes == described["conv_bytes"]


def test_wrong_class_for_the_file():
    with pytest.raises(ValueError, match="kind is 'gdn'"):
        gdn.KimiDeltaAttention.from_gguf(DATA / "qwen35.gguf", 1)
