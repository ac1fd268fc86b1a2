"""The torch.library ops: opcheck, compiled and exported graphs, memory that is shared and not copied."""

import numpy as np
import pytest
from helpers import assert_close, missing

import gdn

try:
    import model_tools
    import torch
    from transformers.cache_utils import DynamicCache
except ImportError as absent:
    missing(absent)

import gdn.adapters.transformers as adapter
from gdn.adapters import torch as base

f32, bf16 = torch.float32, torch.bfloat16


def randn(*shape, dtype=f32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rule(B=2, T=20, dtype=f32, channels=False):
    q, v = randn(B, T, 2, 8, dtype=dtype), randn(B, T, 4, 12, dtype=dtype)
    return q, q.flip(1), v, -randn(*((B, T, 4, 8) if channels else (B, T, 4))).abs(), randn(B, T, 4, dtype=dtype).sigmoid()


CUTS = torch.tensor([0, 3, 20])
CASES = [
    ("gated_delta_rule", rule()), ("gated_delta_rule", (*rule(channels=True), randn(2, 4, 8, 12), 0.3, True, None, True)),
    ("gated_delta_rule", (*rule(1, dtype=bf16), randn(2, 4, 8, 12), None, False, CUTS, True)),
    ("gated_delta_rule_update", (*rule(), randn(2, 4, 8, 12), None, True, None, True)),
    ("gated_delta_rule_update", (*rule(2, 1), randn(2, 4, 12, 8).mT)),
    ("gated_delta_rule_update", (*rule(1), randn(2, 4, 8, 12), None, False, CUTS)),
    ("causal_conv1d", (randn(2, 9, 6), randn(6, 4))),
    ("causal_conv1d", (randn(1, 20, 6, dtype=bf16), randn(6, 4), randn(6), randn(2, 6, 4), "silu", CUTS)),
    ("causal_conv1d", (randn(2, 6, 9).transpose(1, 2), randn(6, 4), None, randn(2, 6, 3), "swish")),
    ("causal_conv1d_update", (randn(2, 1, 6), randn(2, 6, 4), randn(6, 4), randn(6), "silu")),
    ("causal_conv1d_update", (randn(2, 3, 6, dtype=bf16), randn(2, 6, 5, dtype=bf16), randn(6, 4), None, None)),
    ("rms_norm_gated", (randn(7, 12), randn(7, 12), randn(12))),
    ("rms_norm_gated", (randn(2, 5, 3, 12, dtype=bf16), randn(2, 5, 3, 12), randn(12), 1e-5, "sigmoid")),
    ("decay_gate", (randn(2, 5, 4), -randn(4).abs(), randn(4))),
    ("decay_gate", (randn(2, 5, 4, 8, dtype=bf16), -randn(4).abs(), randn(32), -5.0)),
    ("decay_gate", (randn(2, 5, 4, 8), -randn(4).abs())),
]


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_opcheck(name, arguments):
    op = getattr(torch.ops.gdn, name).default
    torch.library.opcheck(op, arguments)
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    ours, plain = op(*arguments), getattr(base, name)(*copies)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, plain)), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    for a, b in zip(arguments, copies, strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b)


def test_memory_is_shared():
    """float32 tensors reach the kernels as they lie, and states are updated where they are."""
    x = randn(3, 5)
    assert np.shares_memory(base.array(x, "x"), x.numpy()) and base.array(x[:, ::2], "x").strides == (20, 8)
    *tensors, state = *rule(2, 1), randn(2, 4, 8, 12)
    before, address = state.clone(), state.data_ptr()
    out = base.gated_delta_rule_update(*tensors, state)
    expected, end = gdn.gated_delta_net(*(t.numpy() for t in tensors), before.mT.numpy(), head_map="interleaved", mode="auto")
    assert address == state.data_ptr() and np.array_equal(state.mT.numpy(), end) and np.array_equal(out.numpy(), expected)


@pytest.mark.parametrize(("name", "arguments", "kind", "message"), [
    ("gated_delta_rule", (*rule()[:3], randn(2, 20, 3), rule()[4]), ValueError, "g"),
    ("gated_delta_rule", (rule()[0].double(), *rule()[1:]), TypeError, "q must hold float32"),
    ("gated_delta_rule_update", (*rule(), randn(2, 4, 8, 12, dtype=bf16)), TypeError, "state must hold float32"),
    ("gated_delta_rule_update", (*rule(), randn(1, 4, 8, 12)), ValueError, "state"),
    ("causal_conv1d_update", (randn(2, 1, 6), randn(2, 6, 2), randn(6, 4)), ValueError, "state must be"),
    ("causal_conv1d_update", (randn(2, 1, 6), randn(2, 6, 4), randn(6, 4), None, "gelu"), ValueError, "activation"),
    ("rms_norm_gated", (randn(7, 12), randn(7, 11), randn(12)), ValueError, "gate"),
    ("decay_gate", (randn(2, 5, 4), randn(4).abs() + 1, randn(4)), ValueError, "A"),
])
def test_refused(name, arguments, kind, message):
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    for f in (getattr(torch.ops.gdn, name), getattr(base, name)):
        with pytest.raises(kind, match=message):
            f(*arguments)
    for a, b in zip(arguments, before, strict=True):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)


class Layer(torch.nn.Module):
    """A layer of a family, without a cache or continuing one that is made of two tensors."""

    def __init__(self, family):
        super().__init__()
        model = model_tools.build(family)
        self.layer = next(m for m in model.modules() if hasattr(m, "conv1d") and hasattr(m, "layer_idx"))

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("family", [pytest.param(family, marks=[pytest.mark.slow] * (family != "qwen3_5"))
                                    for family in model_tools.FAMILIES])
def test_compile(family):
    """torch.compile takes a layer as one graph, prefill and cached steps, in which our ops run."""
    torch.compiler.reset()
    layer, x, config = Layer(family).eval(), randn(1, 24, 32), model_tools.config_of(family)
    with torch.no_grad(), adapter.installed(family):
        def steps(call):
            cache = DynamicCache(config=config)
            return torch.cat([call(part, cache=cache) for part in x.split([20, 1, 1, 2], 1)], 1)

        expected = steps(layer.layer)
        compiled = torch.compile(layer.layer, fullgraph=True, backend="aot_eager")
        adapter.calls.clear()
        assert_close(steps(compiled).numpy(), expected.numpy(), family)
        ops = {"gdn::gated_delta_rule", "gdn::causal_conv1d", "gdn::causal_conv1d_update", "gdn::rms_norm_gated"}
        assert ops <= set(adapter.calls) and all("::" in name for name in adapter.calls)
        assert adapter.calls["gdn::gated_delta_rule"] == 4


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_export(family):
    layer, x = Layer(family).eval(), randn(2, 12, 32)
    with torch.no_grad(), adapter.installed(family):
        expected = layer(x)
        program = torch.export.export(layer, (x,), dynamic_shapes={"x": {1: torch.export.Dim("n_tokens", min=8, max=64)}})
        longer = randn(2, 33, 32)
        wanted = layer(longer)
    names = {str(node.target) for node in program.graph.nodes}
    assert {"gdn.gated_delta_rule.default", "gdn.causal_conv1d.default", "gdn.rms_norm_gated.default"} <= names
    with torch.no_grad():
        assert_close(program.module()(x).numpy(), expected.numpy(), family)
        assert_close(program.module()(longer).numpy(), wanted.numpy(), family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear"])
def test_compiled_generation(family):
    """A static cache and the inductor, as generate uses them; the tokens of eager code."""
    model = model_tools.build(family)
    ids = torch.randint(2, 64, (1, 12), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **options)
    torch.compiler.reset()
    with adapter.installed(family):
        model.forward = torch.compile(model.forward)
        adapter.calls.clear()
        assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)
        assert adapter.calls["gdn::gated_delta_rule"] >= 12
