"""The cases that FLA's own tests run forward and that a CPU can: their sizes, types and arguments, on numbers of our own.

From FLA 0.6's tests of the gated delta rule, of KDA and of the convolution.  Left out: backward passes, kernels of one GPU's
backend, context parallelism, intermediate states.  The first and the last value head are compared.
"""

import itertools

import pytest
from helpers import assert_close, missing

try:
    import torch
    import torch.nn.functional as F
except ImportError as error:
    missing(error)

from fla_tools import ROUNDING, bf16, compare, conv_reference, decay, f16, f32, inputs, numpy, reference

from gdn.adapters import fla

GDN, GDN_STEP, KDA, KDA_STEP = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"
CUTS = {15: [0, 15], 300: [0, 15, 100, 300], 1000: [0, 256, 500, 1000], 2000: [0, 15, 100, 300, 1200, 2000],
        4096: [0, 100, 300, 1200, 3000, 4096], 160: [0, 31, 96, 160], 8192: [0, 8192]}

# Function; B, tokens (or the cuts of packed sequences), H, HV, D; type; scale (None: the default), what g is divided by, how
# many decays are masked; and the words among l2 (the norm inside), gate (inside; A, bias, bound: with A_log, dt_bias, lower
# bound), clamp (of g at the bound), sigmoid (inside), double (of it), first (the state's values first), gk, gv, none (no
# recomputation), 16 32 64 (the size of a chunk).
CASES = [
    *((GDN_STEP, 2, T, 2, 4, D, dtype, 1, n, 0, l2) for T, D, n, l2, dtype in itertools.product(
        (1, 15, 63, 300), (64, 32, 100, 256), (1, 0.1, 10), ("", "l2"), (f32, f16))),
    *((GDN, 2, T, 2, 2, D, f16, scale, n, p, "") for T, D, n, scale, p in itertools.product(
        (1, 15, 63, 300), (64, 32, 100, 256), (1, 0.1, 10), (1, 0.1), (0, 0.5))),
    (GDN, 1, [0, 122, 229, 400, 1000], 2, 2, 128, f16, 1, 1, 0.5, ""),

    *((GDN_STEP, *row, 0, f"l2 {word}") for word in ("", "first") for row in (
        (1, 63, 1, 1, 64, f32, 1, 1), (2, 500, 4, 4, 60, f32, 1, 1), (2, 1000, 2, 8, 128, f32, 1, 0.1),
        (3, 1024, 2, 2, 128, f32, 0.1, 1), (4, 1024, 3, 3, 128, f32, 1, 10), (4, 2048, 4, 4, 64, f32, 0.1, 1),
        (2, 1024, 4, 4, 128, f16, 1, 0.1), (2, 1024, 4, 8, 128, f16, 1, 10))),
    *((GDN_STEP, 2, 500, 4, 4, 60, f32, 1, 1, 0, f"l2 {word}") for word in ("gk", "gv", "gk gv")),
    *((GDN, *row) for row in (
        (4, 1024, 4, 4, 128, f16, 0.1, 1, 1.0, ""), (2, 75, 4, 4, 64, f16, 1, 0.01, 0, ""), (2, 500, 3, 3, 60, f16, 1, 1, 0, ""),
        (2, 1000, 3, 3, 64, f16, 0.1, 1, 0.5, ""), (3, 1024, 4, 4, 100, f16, 1, 0.1, 0, ""),
        (4, 1024, 4, 4, 128, f16, 0.1, 1, 0, "l2"), (2, 1500, 4, 4, 128, f16, 0.1, 10, 0, ""),
        (4, 2048, 8, 8, 64, f16, 0.1, 1, 0, ""), (2, 256, 2, 4, 64, f16, 1, 1, 0, ""), (2, 512, 2, 8, 64, f16, 1, 0.1, 0, "l2"),
        (2, 1024, 4, 8, 128, f16, 0.1, 1, 0, ""), *((1, 64, 2, 4, 32, f32, 0.1, 1, 0, size) for size in ("16", "32", "64")),
        (2, 500, 4, 4, 64, f16, 1, 1, 0, "sigmoid"), (3, 1024, 4, 4, 128, f16, 0.1, 1, 0, "l2 sigmoid double"),
        (2, 1024, 4, 8, 128, f16, 0.1, 1, 0, "sigmoid double"), (4, 2048, 8, 8, 64, f16, 0.1, 1, 0, "l2 sigmoid"),
        (1, 63, 1, 1, 64, f16, 1, 1, 0, "first"), (2, 500, 3, 3, 60, f16, 1, 1, 0, "first"),
        (3, 1024, 4, 4, 128, f16, 0.1, 1, 0, "first"), (4, 2048, 8, 8, 64, f16, 0.1, 1, 0, "first"),
        (2, 75, 4, 4, 64, f16, 1, 1, 0, "l2 gate A bias"), (2, 500, 3, 3, 60, f16, 1, 1, 0, "gate A"),
        (2, 1000, 3, 3, 64, f16, 0.1, 1, 0, "gate A bias"), (3, 1024, 4, 4, 100, f16, 1, 1, 0, "l2 gate A bias"),
        (4, 1024, 4, 4, 128, f16, 0.1, 1, 0, "l2 gate A"), (4, 2048, 8, 8, 64, f16, 0.1, 1, 0, "gate A bias"),
        (2, 256, 2, 4, 64, f16, 1, 1, 0, "l2 gate A bias"), (2, 512, 1, 4, 64, f16, 0.1, 1, 0, "l2 gate A"),
        (2, 512, 2, 8, 64, f16, 1, 1, 0, "l2 gate A bias"), (2, 1024, 4, 8, 128, f16, 0.1, 1, 0, "l2 gate A bias"))),
    *((GDN_STEP, *row, 1, 0, f"l2 gate A {bias}") for *row, bias in (
        (1, 64, 1, 1, 64, f32, 1, ""), (2, 256, 2, 2, 64, f32, 1, "bias"), (2, 512, 2, 4, 64, f16, 0.1, "bias"),
        (3, 1000, 2, 8, 128, f16, 1, ""), (4, 1024, 4, 4, 128, f16, 0.1, "bias"), (1, CUTS[300], 2, 2, 64, f16, None, "bias"),
        (1, CUTS[1000], 2, 4, 64, f16, None, ""), (1, CUTS[2000], 4, 4, 128, f16, None, "bias"))),
    *((GDN_STEP, *row, 1, 0, f"l2 sigmoid {double}") for *row, double in (
        (1, 64, 1, 1, 64, f32, 1, ""), (2, 512, 2, 4, 64, f16, 0.1, "double"), (3, 1000, 2, 8, 128, f16, 1, "double"),
        (4, 1024, 4, 4, 128, f16, 0.1, ""))),
    *((GDN, 1, CUTS[n], H, HV, D, f16, None, 1, p, words) for n, H, HV, D, p, words in (
        (15, 4, 4, 60, 0, ""), (1000, 4, 4, 64, 0, ""), (1000, 4, 4, 64, 0.5, ""), (2000, 4, 4, 100, 0, ""),
        (1000, 2, 4, 64, 0, ""), (1000, 2, 8, 64, 0, ""), (8192, 4, 4, 60, 0, ""), (15, 4, 4, 60, 0, "l2 gate A bias"),
        (1000, 4, 4, 64, 0, "l2 gate A"),
        (1000, 4, 4, 64, 0, "l2 gate A bias"), (2000, 4, 4, 100, 0, "l2 gate A bias"))),

    *((KDA_STEP, *row) for row in (
        (1, 64, 1, 1, 64, f32, 1, 1, 0, ""), (2, 512, 3, 3, 60, f32, 1, 1, 0, ""), (3, 1000, 4, 4, 100, f32, 0.1, 1, 0, "l2"),
        (4, 1024, 4, 4, 128, f32, 0.1, 1, 0, ""), (2, 512, 2, 4, 60, f32, 1, 1, 0, ""),
        (2, 1024, 2, 8, 128, f32, 0.1, 1, 0, "l2"), (2, 256, 4, 4, 64, f32, None, 1, 0, "sigmoid"),
        (2, 256, 4, 4, 64, f32, None, 1, 0, "sigmoid double"), (1, 512, 3, 3, 60, f32, None, 1, 0, "sigmoid double"),
        (1, 64, 1, 1, 64, f32, 1, 1, 0, "first"), (2, 512, 3, 3, 60, f32, 1, 1, 0, "first"),
        (3, 1000, 4, 4, 100, f32, 0.1, 1, 0, "first"),
        (4, 1024, 4, 4, 128, f32, 0.1, 1, 0, "first"),
        (1, 64, 1, 1, 64, f32, 1, 1, 0, "l2 gate A"), (2, 256, 2, 2, 64, f32, 1, 1, 0, "l2 gate A bias"),
        (2, 512, 2, 4, 64, f16, 0.1, 1, 0, "l2 gate A bias bound"), (3, 1000, 2, 8, 128, f16, 1, 1, 0, "l2 gate A"),
        (4, 1024, 4, 4, 128, f16, 0.1, 1, 0, "l2 gate A bias bound"), (1, 64, 1, 1, 64, f32, 1, 1, 0, "l2 gate bound"),
        (2, 256, 2, 4, 64, f32, 1, 1, 0, "l2 gate bias bound"))),
    *((KDA, *row) for row in (
        (1, 63, 1, 1, 64, f16, 1, 1, 0, "clamp"), (2, 500, 3, 3, 60, f16, 1, 1, 0, "clamp none"),
        (2, 1000, 3, 3, 64, f16, 0.1, 1, 0.5, "none"), (3, 1024, 4, 4, 100, f16, 1, 0.1, 0, ""),
        (4, 1024, 4, 4, 128, f16, 0.1, 1, 0, "clamp none"), (4, 1024, 4, 4, 128, f16, 0.1, 1, 0, "l2 clamp"),
        (2, 1500, 4, 4, 128, f16, 0.1, 10, 0, "gate A bias none"), (4, 2048, 8, 8, 64, f16, 0.1, 1, 0, "gate A bias bound none"),
        (2, 1024, 2, 4, 64, f16, 0.1, 1, 0, ""), (2, 1024, 2, 8, 64, f16, 0.1, 1, 0, "gate A bias"),
        (2, 1024, 4, 8, 128, f16, 0.1, 1, 0, "l2 gate A bias"), (2, 160, 2, 4, 64, f16, 0.1, 1, 0, "gate A bias bound none 32"),
        (2, 1024, 2, 4, 64, bf16, 0.1, 1, 0, "l2 gate A bias bound"), (2, 1024, 2, 4, 64, bf16, 0.1, 1, 0, "gate A bias"),
        (2, 160, 2, 4, 64, bf16, 0.1, 1, 0, "gate A bias bound none 32"), (2, 1024, 2, 8, 128, bf16, 0.1, 1, 0, "l2 gate A bias"),
        (1, 63, 1, 1, 64, f16, 1, 1, 0, "first"), (2, 500, 3, 3, 60, f16, 1, 1, 0, "first"),
        (3, 1024, 4, 4, 128, f16, 0.1, 1, 0, "first"), (4, 2048, 8, 8, 64, f16, 0.1, 1, 0, "first"),
        (1, 8192, 96, 96, 128, bf16, None, 1, 0, "sigmoid"), (1, 8192, 96, 96, 128, bf16, None, 1, 0, "sigmoid double"),
        (2, 96, 2, 2, 64, f16, None, 1, 0, "sigmoid double"),
        *((1, CUTS[n], 4, 4, D, f16, None, 1, p, words) for n, D, p, words in (
            (15, 60, 0.1, "gate A bias"), (1000, 64, 0.9, "gate A bias"), (1000, 128, 0.5, ""), (2000, 100, 0, "gate A bias"),
            (4096, 256, 0, "clamp none"), (160, 60, 0.1, "gate A bias none 32"), (8192, 60, 0.1, "gate A bias"))))),
]
GRID = 4 * 4 * 3 * (2 * 2 + 2 * 2)


def named(i, row):
    """A row as a parameter; those that take long, and all but some of the grid at the head of CASES, are for the slow run."""
    name, B, T, _, HV, D, *_ = row
    slow = B * (T if isinstance(T, int) else T[-1]) * HV * D * D > 1.5e7 or (i < GRID and i % 11 > 0)
    return pytest.param(*row, id="-".join(str(x).removeprefix("torch.") for x in row if x != ""), marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(("name", "B", "T", "H", "HV", "D", "dtype", "scale", "normalizer", "mask_p", "words"),
                         [named(*x) for x in enumerate(CASES)])
def test_rule(name, B, T, H, HV, D, dtype, scale, normalizer, mask_p, words):
    words, per_channel = words.split(), "kda" in name
    cuts = None if isinstance(T, int) else T
    T = T if cuts is None else cuts[-1]
    case = inputs(B, T, H, HV, D, D, per_channel, dtype, normalizer=normalizer, mask_p=mask_p, n_states=cuts and len(cuts) - 1)
    options, expected = {"scale": scale, "use_qk_l2norm_in_kernel": "l2" in words}, dict(case)
    if "l2" in words:
        case |= {"q": 3 * case["q"], "k": case["k"] / 2}
        expected |= {"q": case["q"], "k": case["k"]}
    if "gate" in words:
        case["g"] = torch.randn_like(case["g"]).to(dtype)
        options |= {"use_gate_in_kernel": True, "A_log": torch.randn(HV) if "A" in words else None,
                    "dt_bias": torch.randn(case["g"].shape[2:].numel()) if "bias" in words else None}
        bound = -5.0 if "bound" in words else None
        if bound is not None:
            options |= {"lower_bound": bound, "safe_gate": True}
        expected["g"] = decay(case["g"], options["A_log"], options["dt_bias"], bound)
    if "clamp" in words:
        case["g"] = expected["g"] = case["g"].clamp(-5, 0)
        options |= {"safe_gate": True, "lower_bound": -5.0}
    if "sigmoid" in words:
        case["beta"] = torch.randn_like(case["beta"])
        options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": "double" in words}
        expected["beta"] = case["beta"].float().sigmoid() * (2 if "double" in words else 1)
    if "first" in words:
        case["initial_state"] = case["initial_state"].transpose(-1, -2).contiguous()
        options["state_v_first"] = True
    if "none" in words:
        options["disable_recompute"] = True
    options |= dict(("chunk_size", int(word)) for word in words if word.isdigit())
    if cuts is not None:
        options["cu_seqlens"] = torch.tensor(cuts)
        options |= {"cu_seqlens_cpu": options["cu_seqlens"]} if "chunk" in name else {}
    if "gk" in words or "gv" in words:
        return by_channel(name, case, options, words)
    heads = sorted({0, HV - 1})
    keys = [h // (HV // H) for h in heads]
    expected = {x: t[:, heads] if x == "initial_state" else t[:, :, keys if x in "qk" else heads] for x, t in expected.items()}
    expected = reference(**expected, scale=scale, cu_seqlens=cuts, l2norm="l2" in words)
    if "first" in words:
        expected = expected[0], expected[1].swapaxes(-1, -2)
    compare(name, case, expected, dtype, heads, **options)


def by_channel(name, case, options, words):
    """gk and gv, one or both, with and without g, against a head for every value column."""
    T, HV, D = case["v"].shape[1:]
    extra = {word: F.logsigmoid(torch.randn(len(case["v"]), T, HV, D)) for word in words if word in ("gk", "gv")}
    for g in (case["g"], None):
        outs, ends = [], []
        total = (torch.zeros(1) if g is None else g.unsqueeze(3)) + extra.get("gk", torch.zeros_like(case["v"]))
        for column in (0, D - 1):
            one = slice(column, column + 1)
            decays = total + extra["gv"][..., one] if "gv" in words else total
            out, end = reference(case["q"], case["k"], case["v"][..., one], decays, case["beta"], case["initial_state"][..., one],
                                 options["scale"], l2norm=True)
            outs.append(out)
            ends.append(end)
        out, final = getattr(fla, name)(**case | extra | {"g": g}, output_final_state=True, **options)
        for i, column in enumerate((0, D - 1)):
            assert_close(numpy(out[..., column:][..., :1]), outs[i], "out")
            assert_close(numpy(final[..., column:][..., :1]), ends[i], "state", 2e-5)


# Convolution: (B, T, D, W, activation, bias, residual, type); a list for T is the cuts of packed sequences.
CONVOLUTIONS = [
    (2, 64, 128, 3, "swish", True, True, f32), (2, 128, 128, 4, "swish", False, True, f32),
    (2, 64, 128, 3, "swish", True, False, f32), (2, 128, 128, 4, "swish", False, False, f32),
    (2, 500, 1024, 3, None, True, True, f32), (2, 1024, 1024, 4, None, False, True, f32),
    (2, 64, 128, 3, None, True, False, f16), (2, 128, 128, 4, None, False, False, f16),
    (2, 128, 128, 4, "silu", False, False, bf16), (1, 9, 20, 1, None, False, False, f32),
    *((2, T, 128, W, "swish", True, True, f32) for T, W in ((1, 3), (2, 3), (2, 4), (3, 4), (4, 4))),
    (2, 64, 100, 3, "swish", True, True, f32), *((3, 128, D, 4, "swish", True, True, f32) for D in (128, 256, 512)),
    *((2, 128, D, 4, "swish", True, True, f32) for D in (1024, 2048, 4096, 8192)), (1, 1, 64, 3, "swish", True, True, f32),
    (2, 128, 512, 4, None, True, False, f32), (1, 8192, 8192, 4, "swish", True, False, f32),
    *((1, cuts, *row) for cuts in ([0, 17, 130, 311, 500], [0, 1, 3, 200, 500]) for row in (
        (128, 3, "swish", True, True, f32), (128, 3, None, True, False, f16))),
    *((1, [0, 16, 500, 501, 1024], *row) for row in (
        (200, 4, "swish", False, True, f32), (1024, 4, None, False, False, f16), (4096, 3, "swish", True, False, f32),
        (4096, 4, "swish", False, False, f32), (4096, 3, None, True, False, f16), (4096, 4, None, False, False, f16))),
    (1, [0, 42, 84, 128], 64, 4, "swish", True, True, f32), (1, [0, 64, 128, 192, 256], 128, 3, None, False, True, f32),
    (1, [0, 32, 64], 128, 4, "swish", True, False, f16), (1, [0, 66, 132, 200], 64, 3, None, False, False, f16),
    (1, [0, 1, 3], 64, 4, "swish", True, True, f32), (1, [0, 1, 3], 64, 3, None, False, True, f32),
    (1, [*range(0, 4096, 32), 4096, 12288], 4096, 4, "swish", True, False, f32),
]


@pytest.mark.parametrize(("B", "T", "D", "W", "activation", "bias", "residual", "dtype"), [
    pytest.param(*row, marks=[pytest.mark.slow] * (row[0] * (row[1] if isinstance(row[1], int) else row[1][-1]) * row[2] > 2e6))
    for row in CONVOLUTIONS])
def test_convolution(B, T, D, W, activation, bias, residual, dtype):
    """With and without a state, one call, as a part of a wider tensor, every other token, and token by token."""
    torch.manual_seed(0)
    cuts = [0, T] if isinstance(T, int) else T
    wide = torch.randn(B, cuts[-1], D + 32).to(dtype)
    x, weight = wide[:, :, 16:-16], torch.randn(D, W).to(dtype)
    bias, residual = torch.randn(D).to(dtype) if bias else None, torch.randn(x.shape).to(dtype) if residual else None
    packed = {} if isinstance(T, int) else {"cu_seqlens": torch.tensor(cuts)}
    bound = 3 * ROUNDING[dtype]
    for state in (None, torch.randn(B if isinstance(T, int) else len(cuts) - 1, D, W).to(dtype)):
        parts = [conv_reference(x[:, a:b], weight, bias, state if state is None or not packed else state[i:i + 1], activation)
                 for i, (a, b) in enumerate(zip(cuts[:-1], cuts[1:], strict=True))]
        expected, end = torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts])
        expected = expected if residual is None else expected + residual
        for tokens in (x, x.contiguous()):
            out, final = fla.causal_conv1d(tokens, weight, bias, residual, state, True, activation, "cuda", **packed)
            assert out.dtype == final.dtype == dtype
            assert_close(numpy(out), expected.numpy(), "out", bound)
            assert torch.equal(final.float(), end)
        assert fla.causal_conv1d(x, weight, bias, None, state, activation=activation, **packed)[1] is None
    if packed or cuts[-1] * D > 2e5:
        return
    cache = state.clone()
    steps = [fla.causal_conv1d_update(x[:, t:t + 1], cache, None if residual is None else residual[:, t:t + 1], weight, bias,
                                      activation) for t in range(cuts[-1])]
    assert all(returned is cache for _, returned in steps)
    assert_close(numpy(torch.cat([out for out, _ in steps], 1)), expected.numpy(), "steps", bound)
    assert torch.equal(cache.float(), end)
    every = wide.repeat_interleave(2, 1)[:, ::2, 16:-16]
    assert torch.equal(fla.causal_conv1d(every, weight, bias, residual, state, True, activation)[0],
                       fla.causal_conv1d(x, weight, bias, residual, state, True, activation)[0])
