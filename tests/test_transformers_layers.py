"""Layers against transformers' own modules: random tiny configurations of every family, run on the CPU."""

import numpy as np
import pytest
from helpers import assert_close, optional
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_cases import run
from transformers_layers import FAMILIES, FIXED, build, load, ours, recorded, settings_of, theirs

import gdn
from gdn.adapters import state_dict


def compare(family, data):
    """A sequence in parts, and three sequences mixed in one batch, on one random layer of the family."""
    fields, seed = data.draw(settings_of(family)), data.draw(st.integers(0, 2**16))
    mixer, config = build(family, fields, seed)
    layer, rng = load(family, mixer, config), np.random.default_rng(seed)
    # Of few tokens, all may come out near zero, where the norm shows float32's rounding in either.
    parts = data.draw(st.permutations([data.draw(st.integers(16, 70)), data.draw(st.integers(1, 40)), 1]))
    parts = [*parts, 1, 1]
    x = rng.standard_normal((sum(parts), layer.n_embd)).astype(np.float32)
    expected = theirs(mixer, config, x, [sum(parts) - 2, 1, 1])
    assert_close(ours(layer, x, parts), expected, f"{family} {parts}", 1e-5)
    assert_close(ours(layer, x, [sum(parts)]), expected, family, 1e-5)

    lengths = data.draw(st.permutations([*data.draw(st.tuples(st.integers(1, 5), st.integers(1, 30))), 16]))
    ids = rng.permutation(np.repeat(np.arange(3), lengths))
    x = rng.standard_normal((len(ids), layer.n_embd)).astype(np.float32)
    ring = gdn.StateRing.create(3, n_layers=1, **layer.extents)
    for seq_id in range(3):
        ring.acquire(seq_id)
    y = run(layer, ring, x, ids)
    expected = np.empty_like(y)
    for seq_id, n in enumerate(lengths):
        expected[ids == seq_id] = theirs(mixer, config, x[ids == seq_id], [n])
    assert_close(y, expected, f"{family} mixed", 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_layers(family, data):
    compare(family, data)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_many_random_layers(family, data):
    compare(family, data)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_intermediate(family):
    mixer, config = build(family, FIXED[family], 7)
    layer = load(family, mixer, config)
    x, trace = np.random.default_rng(7).standard_normal((71, layer.n_embd)).astype(np.float32), {}
    with recorded(family, mixer) as expected:
        theirs(mixer, config, x, [71])
    ours(layer, x, [71], trace=trace)
    assert set(trace) == set(expected)
    for name, array in trace.items():
        assert_close(array, expected[name].numpy().reshape(array.shape), f"{family} {name}", 1e-5)


@pytest.mark.parametrize("family, wrapper", [("qwen3_5", "Qwen3_5Config"), ("qwen3_5_moe", "Qwen3_5MoeConfig"),
                                             ("qwen4_exp", "Qwen4ExpConfig"), ("glm5_next", "Glm5NextConfig")])
def test_configurations_around_the_text_models(family, wrapper):
    """An object, its dict and the flat fields give one layer."""
    fields = FIXED[family] | {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2, "vocab_size": 32}
    mixer, config = build(family, FIXED[family], 5)
    weights = mixer.state_dict()
    whole = getattr(optional("transformers"), wrapper)(text_config=fields)
    expected = state_dict.read_layer(weights, "", config)[1]
    for form in (whole, whole.to_dict(), {"model_type": family, "text_config": config}, config.to_dict()):
        assert state_dict.read_layer(weights, "", form)[1] == expected
