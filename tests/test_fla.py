"""gdn.adapters.fla against the float64 reference: every parameter of FLA's functions, and the sizes its own tests run."""

import importlib
import inspect
import subprocess
import sys

import numpy as np
import pytest
from helpers import assert_close, missing

import gdn

try:
    import torch
    import torch.nn.functional as F
except ImportError as error:
    missing(error)

from gdn.adapters import fla

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
ROUNDING = {f32: 1e-5, f16: 2**-10, bf16: 2**-7}
FUNCTIONS = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"]


def inputs(B, T, H, HV, K, V, per_channel, dtype=f32, seed=0, normalizer=1.0, mask_p=0.0, n_states=None):
    torch.manual_seed(seed)
    g = F.logsigmoid(torch.randn((B, T, HV, K) if per_channel else (B, T, HV))) / normalizer
    q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1).to(dtype) for _ in range(2))
    return {"q": q, "k": k, "v": torch.randn(B, T, HV, V).to(dtype),
            "g": g * (torch.rand_like(g) >= mask_p), "beta": torch.rand(B, T, HV).to(dtype),
            "initial_state": torch.randn(n_states or B, HV, K, V)}


def numpy(x):
    return x.float().numpy()


def reference(q, k, v, g, beta, initial_state=None, scale=None, cu_seqlens=None, l2norm=False):
    """(out, final state [key][value]) in float64, sequence by sequence."""
    cuts = [(i, slice(None), slice(i, i + 1)) for i in range(len(q))] if cu_seqlens is None else [
        (0, slice(a, b), slice(n, n + 1)) for n, (a, b) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True))]
    outs, states = [], []
    for row, tokens, n in cuts:
        arrays = [numpy(x)[row:row + 1, tokens] for x in (q, k, v, g, beta)]
        state = None if initial_state is None else numpy(initial_state)[n].swapaxes(-1, -2)
        out, end = gdn.reference.recurrent(*arrays, state, scale=scale, head_map="interleaved", qk_l2norm=l2norm)
        outs.append(out)
        states.append(end.swapaxes(-1, -2))
    return np.concatenate(outs, 1 if cu_seqlens is not None else 0), np.concatenate(states)


def compare(name, case, expected, dtype=f32, **options):
    out, final = getattr(fla, name)(**case, output_final_state=True, **options)
    assert out.dtype == case["q"].dtype and final.dtype == f32 and final.is_contiguous()
    assert_close(numpy(out), expected[0], name, 2 * ROUNDING[dtype])
    assert_close(numpy(final), expected[1], name, 2e-5)


def sizes(*rows, limit=2e8):
    """Cases as parameters, the long ones for the slow run; a row is (B, T, H, HV, D, ...)."""
    return [pytest.param(*row, id="-".join(map(str, row)), marks=[pytest.mark.slow] * (B * T * HV * D**2 > limit))
            for row in rows for B, T, _, HV, D, *_ in [row]]


@pytest.mark.parametrize("D", [32, 100, *(pytest.param(D, marks=pytest.mark.slow) for D in (64, 256))])
@pytest.mark.parametrize("T", [1, 15, 63, pytest.param(300, marks=pytest.mark.slow)])
def test_recurrent_sizes(T, D):
    for normalizer in (1, 0.1, 10):
        for dtype in (f32, f16):
            case = inputs(2, T, 2, 4, D, D, False, dtype, normalizer=normalizer)
            compare("fused_recurrent_gated_delta_rule", case, reference(**case, scale=1), dtype, scale=1)
    case |= {"q": 3 * torch.randn(2, T, 2, D), "k": 3 * torch.randn(2, T, 2, D)}       # float32 beside float16
    compare("fused_recurrent_gated_delta_rule", case, reference(**case, scale=1, l2norm=True), f16, scale=1,
            use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize("D", [32, 100, *(pytest.param(D, marks=pytest.mark.slow) for D in (64, 256))])
@pytest.mark.parametrize("T", [1, 15, 63, pytest.param(300, marks=pytest.mark.slow)])
def test_chunk_sizes(T, D):
    for normalizer, mask_p in ((1, 0), (0.1, 0.5), (10, 0), (1, 0.5)):
        case = inputs(2, T, 2, 2, D, D, False, f16, normalizer=normalizer, mask_p=mask_p)
        case["beta"] = torch.ones(2, T, 2, dtype=f16)
        for scale in (1, 0.1):
            compare("chunk_gated_delta_rule", case, reference(**case, scale=scale), f16, scale=scale)


@pytest.mark.parametrize(("B", "T", "H", "HV", "D", "scale", "normalizer", "l2norm"), sizes(
    (1, 64, 1, 1, 64, 1, 1, False), (2, 512, 3, 3, 60, 1, 1, False), (3, 1000, 4, 4, 100, 0.1, 1, True),
    (4, 1024, 4, 4, 128, 0.1, 1, False), (2, 70, 2, 4, 64, 1, 1, True)))
def test_recurrent_kda_sizes(B, T, H, HV, D, scale, normalizer, l2norm):
    case = inputs(B, T, H, HV, D, D, True, normalizer=normalizer)
    expected = reference(**case, scale=scale, l2norm=l2norm)
    compare("fused_recurrent_kda", case, expected, scale=scale, use_qk_l2norm_in_kernel=l2norm)


@pytest.mark.parametrize(("B", "T", "H", "HV", "D", "scale", "normalizer", "mask_p", "l2norm", "gate", "bound"), sizes(
    (1, 63, 1, 1, 64, 1, 1, 0, False, False, None), (2, 500, 3, 3, 60, 1, 1, 0, False, False, None),
    (2, 1000, 3, 3, 64, 0.1, 1, 0.5, False, False, None), (3, 1024, 4, 4, 100, 1, 0.1, 0, False, False, None),
    (4, 1024, 4, 4, 128, 0.1, 1, 0, True, False, None), (2, 1500, 4, 4, 128, 0.1, 10, 0, False, True, None),
    (4, 2048, 8, 8, 64, 0.1, 1, 0, False, True, None), (1, 200, 2, 4, 64, 1, 1, 0, True, True, -5.0),
    (1, 100, 2, 4, 64, 1, 1, 0.5, False, False, -5.0)))
def test_chunk_kda_sizes(B, T, H, HV, D, scale, normalizer, mask_p, l2norm, gate, bound):
    case, options = inputs(B, T, H, HV, D, D, True, f16, normalizer=normalizer, mask_p=mask_p), {}
    expected = dict(case)
    if gate:
        case["g"], options = torch.randn(B, T, HV, D), {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV * D)}
        x = case["g"].double() + options["dt_bias"].double().view(HV, D)
        a = options["A_log"].double().exp()[:, None]
        expected["g"] = (-a * F.softplus(x) if bound is None else bound * torch.sigmoid(a * x)).float()
    elif bound is not None:
        case["g"] = expected["g"] = case["g"].clamp(bound, 0)
    compare("chunk_kda", case, reference(**expected, scale=scale, l2norm=l2norm), f16, scale=scale, lower_bound=bound,
            use_qk_l2norm_in_kernel=l2norm, use_gate_in_kernel=gate, safe_gate=bound is not None, **options)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("cuts", [[0, 15], [0, 1, 100, 300, 300, 700], [0, 122, 229, 400, 1000]], ids=str)
def test_packed(name, cuts):
    for D, dtype in ((60, f32), (128, f16)):
        case = inputs(1, cuts[-1], 2, 2, D, D, "kda" in name, dtype, mask_p=0.5, n_states=len(cuts) - 1)
        if "kda" not in name:
            case["initial_state"] = case["initial_state"].to(dtype)
        for given in (torch.tensor(cuts), torch.tensor(cuts, dtype=torch.int32)):
            compare(name, case, reference(**case, cu_seqlens=cuts), dtype, cu_seqlens=given)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
def test_arguments(name, dtype):
    """Grouped heads, S_k != S_v, and every argument that FLA's functions compute with, each against the reference."""
    per_channel, recurrent = "kda" in name, "recurrent" in name
    case = inputs(2, 40, 2, 6, 16, 24, per_channel, dtype)
    compare(name, case, reference(**case), dtype)
    compare(name, {k: x for k, x in case.items() if k != "initial_state"}, reference(**case | {"initial_state": None}), dtype)
    renamed = {{"q": "query", "k": "key", "v": "value"}.get(key, key): x for key, x in case.items()}
    assert getattr(fla, name)(**renamed)[1] is None
    assert torch.equal(getattr(fla, name)(**renamed)[0], getattr(fla, name)(**case)[0])

    for key in ("state_v_first", "transpose_state_layout"):
        swapped = case | {"initial_state": case["initial_state"].transpose(-1, -2).contiguous()}
        out, final = getattr(fla, name)(**swapped, output_final_state=True, **{key: True})
        assert_close(numpy(final.transpose(-1, -2)), reference(**case)[1], key, 2e-5)
        assert final.is_contiguous()

    beta = torch.randn(2, 40, 6).to(dtype)
    for factor in (1, 2):
        expected = reference(**case | {"beta": factor * beta.float().sigmoid()})
        compare(name, case | {"beta": beta}, expected, dtype, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=factor == 2)

    raw, A_log = torch.randn_like(case["g"]).to(dtype), torch.randn(6)
    x = raw.float()
    for dt_bias in (None, torch.randn(case["g"].shape[2:].numel())):
        x = x if dt_bias is None else raw.float() + dt_bias.view(case["g"].shape[2:])
        a = A_log.exp()[:, None] if per_channel else A_log.exp()
        expected = reference(**case | {"g": -a * F.softplus(x)})
        compare(name, case | {"g": raw}, expected, dtype, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)
        for A_log_ in (A_log.view(1, 1, 6, 1), None) if per_channel else ():
            g = -5 * torch.sigmoid(x if A_log_ is None else a * x)
            compare(name, case | {"g": raw}, reference(**case | {"g": g}), dtype, use_gate_in_kernel=True, A_log=A_log_,
                    dt_bias=dt_bias, lower_bound=-5.0, safe_gate=True)
    if recurrent:
        plain = {key: x for key, x in case.items() if key not in ("g", "beta")}
        ones = {"g": torch.zeros_like(case["g"]), "beta": torch.ones(2, 40, 6)}
        compare(name, plain, reference(**plain, **ones), dtype)


def test_positions_are_those_of_fla():
    """Callers pass scale and states by position, and filter their keywords by the signature."""
    case = inputs(1, 9, 2, 2, 8, 8, False)
    q, k, v, g, beta, state = case.values()
    expected = reference(**case, scale=0.5)
    for out, final in (fla.chunk_gated_delta_rule(q, k, v, g, beta, 0.5, state, True),
                       fla.fused_recurrent_gated_delta_rule(q, k, v, g, None, None, beta, 0.5, state, True)):
        assert_close(out, expected[0], "out")
        assert_close(final, expected[1], "state")
    case = inputs(1, 9, 2, 2, 8, 8, True)
    q, k, v, g, beta, state = case.values()
    expected = reference(**case, scale=0.5)
    for out, final in (fla.chunk_kda(q, k, v, g, beta, 0.5, state, True),
                       fla.fused_recurrent_kda(q, k, v, g, beta, None, None, 0.5, state, True)):
        assert_close(out, expected[0], "out")
        assert_close(final, expected[1], "state")
    common = {"q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens",
              "use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first",
              "transpose_state_layout", "query", "key", "value"}
    for name in FUNCTIONS:
        assert common <= set(inspect.signature(getattr(fla, name)).parameters)
    kda = set(inspect.signature(fla.chunk_kda).parameters)
    assert {"cp_context", "lower_bound", "safe_gate", "return_intermediate_states"} <= kda


def test_names_of_the_base():
    """gdn.adapters.torch answers for the functions too, and for nothing else of this module."""
    from gdn.adapters import torch as base

    assert all(getattr(base, name) is getattr(fla, name) for name in FUNCTIONS)
    for name in ("as_module", "chunk_gla"):
        with pytest.raises(AttributeError, match=name):
            getattr(base, name)


def conv_reference(x, weight, bias, state, activation):
    """(out, last W inputs) in float64 of x (B, T, D) after state (B, D, W)."""
    W = weight.shape[1]
    full = torch.cat([torch.zeros(len(x), x.shape[2], W) if state is None else state.float(), x.transpose(1, 2).float()], -1)
    y = torch.einsum("bdtw,dw->bdt", full.double().unfold(2, W, 1), weight.double())[:, :, 1:]
    y = y if bias is None else y + bias.double()[:, None]
    return (F.silu(y) if activation else y).transpose(1, 2), full[:, :, -W:]


@pytest.mark.parametrize(("B", "T", "D", "W", "activation", "bias", "residual", "dtype"), [
    (2, 64, 128, 3, "swish", True, True, f32), (2, 128, 128, 4, "swish", False, True, f32),
    (2, 500, 1024, 3, None, True, True, f32), (2, 64, 128, 3, None, True, False, f16),
    (2, 128, 128, 4, "silu", False, False, bf16), (2, 2, 128, 4, "swish", True, True, f32),
    (2, 3, 128, 4, "swish", True, True, f32), (2, 1, 128, 3, "swish", True, True, f32),
    (1, 9, 20, 1, None, False, False, f32)])
def test_convolution(B, T, D, W, activation, bias, residual, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(B, T, D).to(dtype), torch.randn(D, W).to(dtype)
    bias, residual = torch.randn(D).to(dtype) if bias else None, torch.randn(B, T, D).to(dtype) if residual else None
    for state in (None, torch.randn(B, D, W).to(dtype)):
        expected, end = conv_reference(x, weight, bias, state, activation)
        expected = expected if residual is None else expected + residual
        for tokens in (x, x.view(B, T, 4, -1)):
            rest = None if residual is None else residual.view(tokens.shape)
            out, final = fla.causal_conv1d(tokens, weight, bias, rest, state, True, activation)
            assert out.shape == tokens.shape and out.dtype == final.dtype == dtype
            assert_close(numpy(out.flatten(2)), expected.numpy(), "out", 3 * ROUNDING[dtype])
            assert torch.equal(final.float(), end)
        assert fla.causal_conv1d(x, weight, bias, None, state, activation=activation, backend="cuda")[1] is None
    cache, before, token = state.clone(), state.clone(), x[:, :1]
    out, returned = fla.causal_conv1d_update(token, cache, None, weight, bias, activation)
    assert returned is cache and torch.equal(cache, torch.cat([before[:, :, 1:], token.transpose(1, 2)], -1))
    assert_close(numpy(out), conv_reference(token, weight, bias, before, activation)[0].numpy(), "step", 3 * ROUNDING[dtype])


@pytest.mark.parametrize("given", ["cu_seqlens", "seq_idx", "both"])
def test_packed_convolution(given):
    torch.manual_seed(0)
    cuts = torch.tensor([0, 1, 3, 200, 500])
    x, weight, bias = torch.randn(1, 500, 128), torch.randn(128, 3), torch.randn(128)
    for state in (None, torch.randn(4, 128, 3)):
        parts = [conv_reference(x[:, a:b], weight, bias, None if state is None else state[i:i + 1], "silu")
                 for i, (a, b) in enumerate(zip(cuts[:-1], cuts[1:], strict=True))]
        index = torch.repeat_interleave(torch.arange(4), cuts.diff()).int()[None]
        options = {key: value for key, value in (("cu_seqlens", cuts), ("seq_idx", index)) if given in (key, "both")}
        out, final = fla.causal_conv1d(x, weight, bias, None, state, True, "silu", **options)
        assert_close(out.numpy(), torch.cat([p[0] for p in parts], 1).numpy(), "out")
        assert torch.equal(final, torch.cat([p[1] for p in parts]))


def bad_rule(case):
    """(what is wrong, the keywords, the error, what its message says)."""
    q, g = case["q"], case["g"]
    yield "keyword", {"inital_state": None}, TypeError, "inital_state.*initial_state"
    yield "keyword", {"cu_seq_lens_q": [0, 9]}, TypeError, "cu_seq_lens_q.*cu_seqlens"
    for name in ("seq_idx", "offsets", "segment_ids", "position_ids", "initial_state_indices", "ssm_state_indices", "reverse"):
        yield "keyword", {name: None}, TypeError, f"unexpected keyword argument '{name}'"
    yield "head_first", {"head_first": True}, TypeError, "head_first=True"
    yield "two names", {"query": q}, TypeError, "q once"
    yield "A_log alone", {"A_log": torch.zeros(2)}, TypeError, "A_log with use_gate_in_kernel"
    yield "dt_bias alone", {"dt_bias": torch.zeros(2)}, TypeError, "dt_bias with use_gate_in_kernel"
    yield "A_log missing", {"use_gate_in_kernel": True}, ValueError, "A_log must be given"
    yield "A_log short", {"use_gate_in_kernel": True, "A_log": torch.zeros(3)}, ValueError, "A_log must hold 2"
    yield "dt_bias short", {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(3)}, ValueError, "dt_bias"
    yield "no logit", {"allow_neg_eigval": True}, ValueError, "allow_neg_eigval"
    yield "both layouts", {"state_v_first": True, "transpose_state_layout": True}, TypeError, "not both"
    yield "array", {"g": g.numpy()}, TypeError, "g must be a CPU tensor"
    yield "device", {"g": g.to("meta")}, TypeError, "g must be a CPU tensor"
    for bad in (q.int(), q.bool(), q.to(torch.complex64)):
        yield "integers", {"k": bad}, TypeError, "k must hold floating-point"
    yield "float64", {"beta": case["beta"].double()}, TypeError, "beta must hold float32, float16"
    yield "gate's shape", {"g": g[:, :2]}, ValueError, "g must have the shape"
    yield "axes", {"q": q[0]}, ValueError, "q must have 4 axes"
    yield "state", {"initial_state": torch.zeros(1, 2, 9, 8)}, ValueError, "state"
    yield "boundaries", {"cu_seqlens": [0, 8]}, ValueError, "cu_seqlens"
    yield "boundaries", {"cu_seqlens": [0.0, 9.0]}, TypeError, "cu_seqlens must hold integers"
    yield "gradient", {"v": case["v"].clone().requires_grad_()}, RuntimeError, "v requires a gradient"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bad_input(name):
    case = inputs(1, 9, 2, 2, 8, 8, "kda" in name)
    before = {key: x.clone() for key, x in case.items()}
    bad = list(bad_rule(case))
    if name == "chunk_kda":
        for key in ("return_intermediate_states", "use_graph", "cp_context", "max_num_seqs"):
            bad.append((key, {key: True}, TypeError, key))
        bad.append(("bound", {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "safe_gate": True}, ValueError, "lower_bound"))
    if "kda" in name:
        bad.append(("bound", {"use_gate_in_kernel": True, "lower_bound": 0.5}, ValueError, "lower_bound must be below 0"))
    if name == "fused_recurrent_gated_delta_rule":
        bad += [(key, {key: case["g"]}, TypeError, key) for key in ("gk", "gv")]
    if "chunk" in name:
        bad += [("g", {"g": None}, TypeError, "missing g"), ("beta", {"beta": None}, TypeError, "missing beta"),
                ("size", {"chunk_size": 0}, ValueError, "chunk_size")]
        bad.append(("copy", {"cu_seqlens": [0, 9], "cu_seqlens_cpu": torch.tensor([0, 4, 9])}, ValueError, "cu_seqlens_cpu"))
    for what, options, kind, message in bad:
        with pytest.raises(kind, match=message):
            getattr(fla, name)(**{**case, **options})
        assert all(torch.equal(case[key], before[key]) for key in case), what
    off = {"head_first": False, "A_log": None, "dt_bias": None}
    assert torch.equal(getattr(fla, name)(**case, **off)[0], getattr(fla, name)(**case)[0])
    with torch.no_grad():
        getattr(fla, name)(**{**case, "v": case["v"].clone().requires_grad_()})


def test_bad_convolution():
    x, weight = torch.randn(2, 9, 6), torch.randn(6, 4)
    cache, before = torch.ones(2, 6, 4), torch.ones(2, 6, 4)
    for options, kind, message in (
            ({"cu_seq_lens_q": [0, 9]}, TypeError, "cu_seq_lens_q.*cu_seqlens"),
            ({"cp_context": object()}, TypeError, "cp_context"),
            ({"activation": "gelu"}, ValueError, "activation"), ({"backend": "numpy"}, ValueError, "backend"),
            ({"weight": None}, TypeError, "weight"), ({"weight": weight[:5]}, ValueError, "weight"),
            ({"bias": x[0, 0, :5]}, ValueError, "bias"), ({"initial_state": torch.zeros(2, 6, 3)}, ValueError, "initial_state"),
            ({"residual": x[:1]}, ValueError, "residual"),
            ({"seq_idx": torch.zeros(2, 9)}, TypeError, "seq_idx"), ({"seq_idx": torch.zeros(2, 9).int()}, ValueError, "seq_idx"),
            ({"cu_seqlens": [0, 9]}, ValueError, "cu_seqlens|n_batch|x")):
        with pytest.raises(kind, match=message):
            fla.causal_conv1d(**{"x": x, "weight": weight, **options})
    with pytest.raises(ValueError, match="seq_idx must number"):
        fla.causal_conv1d(x[:1], weight, seq_idx=torch.tensor([[0, 1, 0, 0, 0, 0, 0, 0, 0]]))
    with pytest.raises(ValueError, match="do not cut"):
        fla.causal_conv1d(x[:1], weight, seq_idx=torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1]]), cu_seqlens=[0, 2, 9])
    for bad in ({"x": x}, {"x": x[:, :1], "activation": "gelu"}, {"x": x[:, :1], "weight": weight[:, :3]}, {"x": x[:, :1].int()}):
        with pytest.raises((TypeError, ValueError)):
            fla.causal_conv1d_update(**{"cache": cache, "weight": weight, **bad})
        assert torch.equal(cache, before)


@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="FLA itself is installed, and comes first")
def test_as_module():
    program = """
import gdn.adapters.fla
try:
    import fla
except ImportError:
    pass
else:
    raise SystemExit("fla before as_module()")
assert gdn.adapters.fla.as_module() is gdn.adapters.fla.as_module()
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops import chunk_kda as same
from fla.modules.convolution import causal_conv1d
import fla.modules.conv, fla.modules.causal_conv1d
assert chunk_kda is same is gdn.adapters.fla.chunk_kda and fla.ops.kda.chunk_kda is same
for line in ("from fla.ops import chunk_gla", "import fla.layers", "from fla.ops.kda import naive"):
    try:
        exec(line)
    except ImportError as error:
        print(error)
    else:
        raise SystemExit(line)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
