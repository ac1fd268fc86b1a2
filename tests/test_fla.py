"""gdn.adapters.fla against the float64 reference: every parameter of FLA's functions, and what is refused."""

import importlib
import inspect
import subprocess
import sys

import pytest
from helpers import assert_close, missing

try:
    import torch
    import torch.nn.functional as F
except ImportError as error:
    missing(error)

from fla_tools import FUNCTIONS, bf16, compare, conv_reference, f16, f32, inputs, numpy, reference

from gdn.adapters import fla


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
        bad += [(key, {key: case["g"]}, ValueError, f"{key} must have the shape") for key in ("gk", "gv")]
        bad += [(key, {key: case["v"].double()}, TypeError, f"{key} must hold float32") for key in ("gk", "gv")]
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
