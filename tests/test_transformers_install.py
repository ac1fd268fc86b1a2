"""Whole models of every family with gdn installed in transformers, against the same models without."""

import contextlib
import functools
import logging
import math

import pytest
from helpers import error, missing

try:
    import model_tools
    import torch
    from transformers.cache_utils import DynamicCache
except ImportError as absent:
    missing(absent)

import gdn.adapters.transformers as adapter

BOUND = 1e-4                            # routers and attention magnify what is 1e-6 in a layer
FAMILIES = list(model_tools.FAMILIES)
PARTS = {"causal_conv1d_fn", "causal_conv1d_update", "RMSNormGated.forward"}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    adapter.uninstall()


@contextlib.contextmanager
def only_ours(caplog, family):
    """The family installed, and not one of transformers' own functions run in its place."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, adapter.__name__), adapter.installed(family) as names:
        yield names
    assert not [r for r in caplog.records if r.name == adapter.__name__], caplog.text


def tokens(*shape, seed=0):
    return torch.randint(2, 64, shape, generator=torch.Generator().manual_seed(seed))


def logits(model, ids, parts=None, mask=None, **options):
    """The logits of ids, given in parts that continue a cache (None: one call without a cache)."""
    with torch.no_grad():
        if parts is None:
            return model(ids, attention_mask=mask, use_cache=False, **options).logits
        cache, outs, start = DynamicCache(config=model.config), [], 0
        for n in parts:
            m = None if mask is None else mask[:, :start + n]
            outs.append(model(ids[:, start:start + n], cache=cache, attention_mask=m, use_cache=True).logits)
            start += n
        return torch.cat(outs, 1)


def close(x, ref, bound=BOUND):
    e = error(x.float().numpy(), ref.float().numpy())
    assert e <= bound, e


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens(family, caplog):
    """64 greedy tokens, with and without a cache, a batch; every function of the family ran, and it was ours."""
    model, ids = model_tools.build(family), tokens(2, 19)
    options = {"max_new_tokens": 64, "do_sample": False}
    expected = model.generate(ids, **options)
    adapter.calls.clear()
    with only_ours(caplog, family) as names:
        assert torch.equal(model.generate(ids, **options), expected)
        assert torch.equal(model.generate(ids, use_cache=False, **{**options, "max_new_tokens": 8}), expected[:, :27])
    assert {name for name in names if not name.endswith(("Net.forward", "Attention.forward"))} <= set(adapter.calls)
    assert all(any(part in name for name in names) for part in PARTS)
    assert len(set(expected[0, 19:].tolist())) > 8
    assert torch.equal(model.generate(ids, **{**options, "max_new_tokens": 8}), expected[:, :27])


@pytest.mark.parametrize("family", FAMILIES)
def test_continued(family, caplog):
    """Prefill, one token, several tokens, one again: the same logits, and the same tensors in the cache."""
    model, ids = model_tools.build(family), tokens(2, 90)
    for parts in (None, [70, 1, 1, 7, 1, 10], [2, 1, 87], [1, 1, 3, 85]):
        expected = logits(model, ids, parts)
        with only_ours(caplog, family):
            close(logits(model, ids, parts), expected)
    caches = []
    for context in (contextlib.nullcontext(), only_ours(caplog, family)):
        with context, torch.no_grad():
            cache = model(ids[:, :9], use_cache=True).cache
            layer = cache.layers[0]
            before = layer.conv_states[0].data_ptr(), layer.recurrent_states[0].data_ptr()
            model(ids[:, 9:10], cache=cache, use_cache=True)
            model(ids[:, 10:15], cache=cache, use_cache=True)
            assert before == (layer.conv_states[0].data_ptr(), layer.recurrent_states[0].data_ptr())
            caches.append((layer.conv_states[0], layer.recurrent_states[0]))
    for ours, theirs in zip(*caches, strict=True):
        assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
        close(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding(family, caplog):
    """Left, inner and right padding, as the model masks it; the pads' contents do not matter."""
    model, ids = model_tools.build(family), tokens(3, 40)
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[0, :11], mask[1, 13:18], mask[2, 33:] = 0, 0, 0
    real = mask.bool()
    for parts in (None, [36, 4], [20, 20]):
        expected = logits(model, ids, parts, mask)[real]
        with only_ours(caplog, family):
            close(logits(model, ids, parts, mask)[real], expected)
            other = torch.where(real, ids, tokens(3, 40, seed=9))
            close(logits(model, other, parts, mask)[real], logits(model, ids, parts, mask)[real], 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_beams(family, caplog):
    model, ids = model_tools.build(family), tokens(2, 11)
    options = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **options)
    with only_ours(caplog, family):
        assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_assisted_decoding(family, caplog):
    """Speculation on these models is transformers' to allow or refuse, and stays as it is."""
    model, ids = model_tools.build(family), tokens(1, 11)
    options = {"max_new_tokens": 8, "do_sample": False, "prompt_lookup_num_tokens": 3}

    def outcome():
        try:
            return model.generate(ids, **options).tolist()
        except Exception as refusal:
            return type(refusal), str(refusal)

    expected = outcome()
    with adapter.installed(family):
        assert outcome() == expected


def cuts(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def layer_of(model):
    return next(m for m in model.modules() if hasattr(m, "conv1d") and hasattr(m, "layer_idx"))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed(family, caplog):
    """Three sequences packed in one row of a whole layer equal three calls, under either name of their boundaries."""
    model = model_tools.build(family)
    layer, x, lengths = layer_of(model), torch.randn(1, 40, model_tools.config_of(family).hidden_size), (3, 1, 36)
    index = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).int()[None]
    with torch.no_grad(), only_ours(caplog, family):
        expected = torch.cat([layer(part) for part in x.split(lengths, 1)], 1)
        q = {"cu_seq_lens_q": cuts(*lengths)}
        for options in (q, {"seq_idx": index}, {**q, "seq_idx": index},
                        {**q, "cu_seq_lens_k": cuts(*lengths), "max_length_q": 36, "max_length_k": 36}):
            close(layer(x, **options), expected, 1e-5)
        close(layer(x, cu_seq_lens_q=cuts(40)), layer(x))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_refused(family):
    """What cannot keep sequences apart is refused by name, and the cache is as it was."""
    model = model_tools.build(family)
    layer, x = layer_of(model), torch.randn(1, 40, 32)
    ids = tokens(1, 40)
    with torch.no_grad(), adapter.installed(family):
        cache = model(ids, use_cache=True).cache
        before = [x.clone() for x in (cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0])]
        for options, kind, message in (
                ({"cache": cache, "cu_seq_lens_q": cuts(3, 37)}, ValueError, "use_cache=False"),
                ({"cache": cache, "cu_seq_lens_q": cuts(3, 30)}, ValueError, "use_cache=False|cu_seqlens"),
                ({"cu_seq_lens_q": cuts(3, 30)}, ValueError, "cu_seqlens"),
                ({"cu_seq_lens_q": cuts(3, 37).float()}, TypeError, "cu_seq_lens_q must hold integers"),
                ({"cu_seq_lens_k": cuts(3, 37)}, ValueError, "cu_seq_lens_k is given without"),
                ({"cu_seq_lens_q": cuts(3, 37), "cu_seq_lens_k": cuts(4, 36)}, ValueError, "do not cut"),
                ({"seq_idx": torch.zeros(1, 39).int()}, ValueError, "seq_idx must be"),
                ({"cu_seq_lens_q": cuts(3, 37), "segments": 1}, ValueError, "the keyword segments is not known")):
            with pytest.raises(kind, match=message):
                layer(x, **options)
            after = cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), options
        with pytest.raises(ValueError, match="one row"):
            layer(torch.randn(2, 40, 32), cu_seq_lens_q=cuts(3, 37))
    with adapter.installed(family), pytest.raises(ValueError, match="a gradient is needed"):
        layer(x, cu_seq_lens_q=cuts(3, 37))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family, caplog):
    """Outside no_grad transformers' own functions run and say so once; the gradients are theirs."""
    model, ids = model_tools.build(family), tokens(1, 20)
    grads = []
    for context in (contextlib.nullcontext(), adapter.installed(family)):
        adapter.calls.clear()
        caplog.clear()
        with context, caplog.at_level(logging.WARNING, adapter.__name__):
            model.zero_grad()
            model(ids).logits.square().mean().backward()
            model(ids)
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert not adapter.calls
    said = [r.getMessage() for r in caplog.records if r.name == adapter.__name__]
    assert said == [f"{family}: transformers' own functions run, because a gradient is needed"]
    assert len(grads[0]) > 20 and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def nearness(calls, dtype, family, caplog):
    """The mean log ratio of our distance from float32 over transformers', each call a (module, function of it) pair."""
    ratios = []
    for module, f in calls:
        with torch.no_grad():
            truth = f(module).float()
            module = module.to(dtype)
            theirs = f(module)
            with only_ours(caplog, family):
                ours = f(module)
        assert ours.dtype == theirs.dtype
        distance = [(x.float() - truth).square().mean().sqrt().item() for x in (ours, theirs)]
        ratios.append(math.log(distance[0] / distance[1]))
    return math.fsum(ratios) / len(ratios)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_half_precision(family, dtype, caplog):
    """A layer's output in half precision is at least as near to float32's as transformers' own, prefill and decoding."""
    config = model_tools.config_of(family)

    def run(layer, x):
        cache = DynamicCache(config=config)
        x = x.to(layer.conv1d.weight.dtype if family not in ("glm5_next", "bailing_hybrid") else layer.q_proj.weight.dtype)
        return torch.cat([layer(part, cache=cache) for part in x.split([60, 1, 1, 6, 1, 1], 1)], 1)

    calls = [(layer_of(model_tools.build(family, seed)), functools.partial(run, x=torch.randn(3, 70, 32))) for seed in range(3)]
    assert nearness(calls, dtype, family, caplog) <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_logits(family, caplog):
    """Of whole models in bfloat16, where a router's choice may flip either way: the mean over many models."""
    ids = tokens(4, 70)
    calls = [(model_tools.build(family, seed), lambda model: model(ids, use_cache=False).logits) for seed in range(24)]
    assert nearness(calls, torch.bfloat16, family, caplog) <= 0.05


class Widened(torch.utils._python_dispatch.TorchDispatchMode):
    """How many numbers each cast of half precision to float32 made."""

    def __init__(self):
        super().__init__()
        self.casts = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        copied = args[1] if op is torch.ops.aten.copy_.default else args[0] if op is torch.ops.aten._to_copy.default else None
        if copied is not None and out.dtype == torch.float32 and copied.dtype in (torch.float16, torch.bfloat16):
            self.casts.append(out.numel())
        return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_not_widened(family, dtype, monkeypatch):
    """No function that is installed makes a float32 tensor of activations; transformers' own do."""
    layer, x = layer_of(model_tools.build(family).to(dtype)), torch.randn(2, 80, 32, dtype=dtype)
    config, mode = model_tools.config_of(family), Widened()

    def watched(f):
        def call(*args, **kwargs):
            with mode:
                return f(*args, **kwargs)
        return call

    def casts(least):
        """Those of a prefill, a step and a continuation that are larger than weights."""
        mode.casts.clear()
        with torch.no_grad(), monkeypatch.context() as patch:
            for owner, attribute, make, *_ in adapter._targets(family):
                if make is not adapter._layer:
                    patch.setattr(owner, attribute, watched(getattr(owner, attribute)))
            cache = DynamicCache(config=config)
            for part in x.split([70, 1, 9], 1):
                layer(part, cache=cache)
        return [n for n in mode.casts if n > least]

    weights = max(layer.conv1d.weight.numel(), 9 * 2 * 4)
    assert len(casts(weights)) >= 3
    with adapter.installed(family):
        assert not casts(weights)


def test_install_says_what_it_replaces():
    names = adapter.install()
    assert names == adapter.install() == sorted(names) and len(set(names)) == len(names)
    assert {name.partition(".")[0] for name in names} == set(FAMILIES) == set(adapter.FAMILIES)
    assert len(names) == 6 * len(FAMILIES) + len(model_tools.KDA)
    adapter.uninstall("qwen3_5")
    with adapter.installed(["qwen3_5_text", "kimi_linear"]) as both:
        assert {name.partition(".")[0] for name in both} == {"qwen3_5", "kimi_linear"}
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    assert hasattr(kimi.chunk_kimi_delta_attention, "__wrapped__") and kimi.chunk_kimi_delta_attention.__module__ == kimi.__name__
    original = qwen.causal_conv1d_fn
    adapter.install("qwen3_5")
    assert qwen.causal_conv1d_fn is not original
    adapter.uninstall()
    adapter.uninstall()
    assert qwen.causal_conv1d_fn is original


def test_install_refuses(monkeypatch, caplog):
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    with pytest.raises(ValueError, match="unknown family 'qwen9'.*qwen3_next"):
        adapter.install(["qwen3_next", "qwen9"])
    original = qwen.causal_conv1d_fn
    monkeypatch.setattr("transformers.__version__", "5.99.1")
    with pytest.raises(RuntimeError, match=r"transformers 5\.99\.1 is not known"):
        adapter.install()
    monkeypatch.undo()
    assert qwen.causal_conv1d_fn is original

    def other(x, weight, seq_len=None):
        return x

    monkeypatch.setattr(qwen, "causal_conv1d_fn", other)
    with caplog.at_level(logging.WARNING, adapter.__name__), adapter.installed("qwen3_next") as names:
        assert qwen.causal_conv1d_fn is other and "qwen3_next.causal_conv1d_fn" not in names and len(names) == 5
    assert "qwen3_next.causal_conv1d_fn is left alone" in caplog.text


def test_two_families_and_later_models():
    """Two families in one process; a model built before install and one built after."""
    before, ids = model_tools.build("qwen3_5"), tokens(1, 30)
    expected = logits(before, ids)
    adapter.install(["qwen3_5", "kimi_linear"])
    after, other = model_tools.build("qwen3_5"), model_tools.build("kimi_linear")
    adapter.calls.clear()
    assert torch.equal(logits(before, ids), logits(after, ids))
    close(logits(before, ids), expected)
    ours = logits(other, ids)
    assert {name.partition(".")[0] for name in adapter.calls if "::" not in name} == {"qwen3_5", "kimi_linear"}
    adapter.uninstall()
    close(ours, logits(other, ids))


def test_what_runs_the_original(caplog):
    """Other types, activations and keywords run transformers' own function, with its result."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    x, w = torch.randn(2, 6, 9), torch.randn(6, 4)
    q, g = torch.randn(1, 5, 2, 8), -torch.rand(1, 5, 2)
    state = torch.randn(2, 6, 4)
    theirs = [qwen.causal_conv1d_fn(x, w, None, "gelu"), qwen.causal_conv1d_fn(x.double(), w.double()),
              qwen.causal_conv1d_update(x[:, :, :1], state.clone(), w, None, "gelu"),
              qwen.torch_chunk_gated_delta_rule(q, q, q, g, g)[0],
              qwen.torch_recurrent_gated_delta_rule(q.double(), q, q, g, g)[0]]
    adapter.calls.clear()
    with caplog.at_level(logging.WARNING, adapter.__name__), adapter.installed("qwen3_5"):
        ours = [qwen.causal_conv1d_fn(x, w, None, "gelu"), qwen.causal_conv1d_fn(x.double(), w.double()),
                qwen.causal_conv1d_update(x[:, :, :1], state.clone(), w, None, "gelu"),
                qwen.torch_chunk_gated_delta_rule(q, q, q, g, g, window=3)[0],
                qwen.torch_recurrent_gated_delta_rule(q.double(), q, q, g, g)[0]]
        meta = qwen.causal_conv1d_fn(x.to("meta"), w.to("meta"), None, "silu")
    assert meta.device.type == "meta" and not adapter.calls
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for reason in ("the activation is gelu", "tensors are torch.float64", "the keyword window is not", "tensors are on meta"):
        assert caplog.text.count(reason) == 1


def test_states_in_place():
    """A layer's steps update its cache's state where it is; a function called alone leaves the state that it was given."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    model = model_tools.build("qwen3_5")
    with torch.no_grad(), adapter.installed("qwen3_5"):
        cache = model(tokens(2, 9), use_cache=True).cache
        adapter.calls.clear()
        model(tokens(2, 1), cache=cache, use_cache=True)
        model(tokens(2, 3), cache=cache, use_cache=True)
        assert adapter.calls["gdn::gated_delta_rule_update"] == 4 and "gdn::gated_delta_rule" not in adapter.calls
        state = cache.layers[0].recurrent_states[0]
        before, q, g = state.clone(), torch.randn(2, 1, 2, 16), -torch.rand(2, 1, 4)
        for rule in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
            _, end = rule(q, q, torch.randn(2, 1, 4, 24), g, -g, initial_state=state, output_final_state=True)
            assert torch.equal(state, before) and not torch.equal(end, before)


def test_bad_calls_leave_the_state(caplog):
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    x, state, w = torch.randn(2, 6, 1), torch.randn(2, 6, 4), torch.randn(6, 4)
    before = state.clone()
    with adapter.installed("qwen3_5"):
        for bad in ((x[:, :5], state, w), (x[:1], state, w), (x, state, w[:, 0]), (x, state, w, w[0]), (x, state[:, :, :2], w)):
            with pytest.raises((ValueError, TypeError)):
                qwen.causal_conv1d_update(*bad, activation="silu")
            assert torch.equal(state, before)
        q, g = torch.randn(2, 1, 2, 8), -torch.rand(2, 1, 2)
        state = torch.randn(2, 2, 8, 8)
        before = state.clone()
        for bad in ({"initial_state": state[:1]}, {"initial_state": state[:, :, :4]}, {"g": g[:, :, :1]}, {"beta": g[:1]}):
            with pytest.raises((ValueError, TypeError)):
                qwen.torch_recurrent_gated_delta_rule(**{"query": q, "key": q, "value": q, "g": g, "beta": g,
                                                         "initial_state": state, "output_final_state": True, **bad})
            assert torch.equal(state, before)
