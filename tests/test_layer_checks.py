"""What a layer refuses, and that it says so before anything is written."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from helpers import same_bits
from layer_cases import FAMILIES, Case, run

import gdn
from gdn.adapters import state_dict


@pytest.fixture(params=FAMILIES)
def case(request):
    return Case(request.param)


def test_weights_are_checked(case):
    weights, config = state_dict.read_layer(case.weights, "", case.config)
    cls = type(case.layer)
    for name, w in weights.items():
        with pytest.raises(ValueError, match=f"weights lack {name}, expected shape"):
            cls({n: v for n, v in weights.items() if n != name}, config)
        with pytest.raises(ValueError, match=r"has shape .* expected"):
            cls({**weights, name: w[1:]}, config)
    with pytest.raises(ValueError, match="unknown extra"):
        cls({**weights, "extra": w}, config)
    said = asdict(config)
    for name in ("kind", "n_embd", "H_k", "width", "norm_eps", "head_map", "activation"):
        with pytest.raises(TypeError, match=f"missing .* '{name}'"):
            cls(weights, {n: v for n, v in said.items() if n != name})
    with pytest.raises(ValueError, match=f"needs '{cls.KIND}'"):
        cls(weights, replace(config, kind="gdn" if cls.KIND == "kda" else "kda"))
    for name in case.weights:
        with pytest.raises(ValueError, match="weights lack .*expected shape"):
            cls.from_state_dict({n: v for n, v in case.weights.items() if n != name}, "", case.config)
        with pytest.raises(ValueError, match=f"{name} has shape .*expected"):
            cls.from_state_dict({**case.weights, name: np.zeros((5, 7))}, "", case.config)
    with pytest.raises(ValueError, match="unknown model_type 'llama'"):
        cls.from_state_dict(case.weights, "", {**case.config, "model_type": "llama"})
    zeros = np.zeros((2, 3), np.float32)
    n_out, n_in = weights["out"].shape
    for lora in ({"w": []}, {"out": [(zeros, zeros.T, 1)]}, {"out": [(zeros, zeros.T, np.nan)]}, {"out": None},
                 {"out": [5]}, {"out": [(zeros, zeros.T)]}, {"out": (zeros, zeros.T, 1)},
                 {"out": [(np.zeros((2, n_in), np.float32), np.zeros((n_out, 3), np.float32), 1)]}):
        with pytest.raises(ValueError, match="lora"):
            cls(weights, config, lora)
    for lora in ([1], {"out": [(zeros.astype(np.float64), zeros.T, 1)]}):
        with pytest.raises(TypeError, match="lora"):
            cls(weights, config, lora)


@pytest.mark.parametrize("dtype", ["f8", ">f4", "i4", "c8", "f2"])
def test_weights_are_not_cast(case, dtype):
    weights, config = state_dict.read_layer(case.weights, "", case.config)
    for name in weights:
        with pytest.raises(TypeError, match=f"weights: {name} must be a float32 array, got"):
            type(case.layer)({**weights, name: weights[name].astype(dtype)}, config)


@pytest.mark.parametrize("weights", [None, 5, "x", []], ids=repr)
def test_weights_are_a_mapping(case, weights):
    with pytest.raises(TypeError, match="weights must map names to tensors"):
        type(case.layer).from_state_dict(weights, "", case.config)


def test_calls_are_checked(case):
    ring = case.ring(2)
    ring.acquire(7)
    ring.acquire(8)
    batch = gdn.Batch([7, 7, 8])
    x = case.x[:3]
    with ring.begin(batch) as step:
        for bad, error in ((x[:2], ValueError), (x[:, :63], ValueError), (x.astype(np.float64), TypeError),
                           (x.tolist(), TypeError)):
            with pytest.raises(error):
                case.layer(bad, batch, step, 0)
        for arguments in ((None, step), (batch, None), (step, batch)):
            with pytest.raises(TypeError, match="batch and step must be"):
                case.layer(x, *arguments, 0)
        with pytest.raises(TypeError, match="trace must be a dict"):
            case.layer(x, batch, step, 0, trace=[])
        with pytest.raises(ValueError, match="the step is of sequences"):
            case.layer(x, gdn.Batch([7, 8, 8]), step, 0)
        with pytest.raises(ValueError, match="the step is of sequences .* from .* from"):
            case.layer(x, gdn.Batch([7, 7, 8], [17, 18, 0]), step, 0)       # positions that nobody checked
        before = bytes(np.asarray(ring.ssm(0))), bytes(np.asarray(ring.conv(0)))
        for il, options, error in ((1, {}, IndexError), (-1, {}, IndexError), (0.0, {}, TypeError), (True, {}, TypeError),
                                   (2**80, {}, ValueError), (0, {"mode": "fast"}, ValueError),
                                   (0, {"n_threads": 0}, ValueError), (0, {"n_threads": 1.5}, TypeError)):
            with pytest.raises(error):
                case.layer(x, batch, step, il, **options)
        assert (bytes(np.asarray(ring.ssm(0))), bytes(np.asarray(ring.conv(0)))) == before
        case.layer(x, batch, step, np.int64(0))
    with pytest.raises(ValueError, match="already committed"):
        case.layer(x, batch, step, 0)
    with ring.begin([7, 8], [2, 1]) as step:
        with pytest.raises(ValueError, match="the step is of sequences .* from .-1 -1.*from .0 1"):
            case.layer(x, gdn.Batch([7, 7, 8], [0, 1, 1]), step, 0)             # the step goes on where they stand
        case.layer(x, batch, step, 0)
    for name, n in case.layer.extents.items():
        n = not n if isinstance(n, bool) else {"tiled": "interleaved", "interleaved": "tiled"}.get(n) or n + 1
        other = gdn.StateRing.create(2, n_layers=1, **{**case.layer.extents, name: n})
        other.acquire(7)
        other.acquire(8)
        step = other.begin(batch)
        with pytest.raises(ValueError, match=f"the ring has .*'{name}': {n!r}.* the layer .*"):
            case.layer(x, batch, step, 0)
        step.abort()


def test_arguments_are_mappings(case):
    weights, config = state_dict.read_layer(case.weights, "", case.config)
    for arguments in ((None, config), (weights, None), ([], config), (weights, [])):
        with pytest.raises(TypeError, match="weights must be a mapping and config a gdn.LayerConfig"):
            type(case.layer)(*arguments)
    with pytest.raises(TypeError, match="prefix must be a string"):
        type(case.layer).from_state_dict(case.weights, None, case.config)


@pytest.mark.parametrize("value", ["2", [2], 2.0, True, 0, -1], ids=repr)
def test_extents_of_a_config_are_checked(case, value):
    for name in case.config:
        if name.startswith("linear_") and name != "linear_allow_neg_eigval":
            with pytest.raises(ValueError, match="config: .* must be a positive integer"):
                type(case.layer).from_state_dict(case.weights, "", {**case.config, name: value})


def test_a_layer_stays_what_it_was_made_of(case):
    """Its attributes are not set, and its weights are its own, wherever the caller's lay."""
    def decode(layer):
        ring = case.ring()
        ring.acquire(7)
        return np.concatenate([run(layer, ring, case.x[:1], [7]), run(layer, ring, case.x[1:9], [7] * 8)])

    for name in ("norm_eps", "A", "out", "head_map"):
        with pytest.raises(AttributeError, match=f"{name}: a layer stays"):
            setattr(case.layer, name, None)
    weights, config = state_dict.read_layer(case.weights, "", case.config)
    expected, odd = decode(case.layer), {}
    for name, w in weights.items():
        odd[name] = np.frombuffer(b" " + w.tobytes(), np.uint8)[1:].view(np.float32).reshape(w.shape)
    layer = type(case.layer)(odd, config)
    assert same_bits(decode(layer), expected)
    layer = type(case.layer)(weights, config)
    for w in weights.values():
        w[...] = np.nan
    assert same_bits(decode(layer), expected)
