"""Checkpoints that look fluent and are another model's: read as their family's own class reads them, or refused by name."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers import DATA, assert_close, optional, same_bits
from layer_cases import FAMILIES, Case, family_class, one_sequence

import gdn
from gdn.adapters import state_dict

KIMI, GLM, BAILING = Case("kimi"), Case("kimi"), Case("kimi")
GLM.config = GLM.config | {"model_type": "glm5_next"}
BAILING.config = {"model_type": "bailing_hybrid", "hidden_size": 64, "num_attention_heads": 3, "head_dim": 32,
                  "short_conv_kernel_size": 4, "rms_norm_eps": KIMI.config["rms_norm_eps"]}
BOUNDED = {"gate": "bounded", "lower_bound": -5.0}


def read(case, config=None, weights=None, **options):
    return state_dict.read_layer(case.weights | (weights or {}), "", case.config | (config or {}), **options)


# ---- fields of a config ----------------------------------------------------------------------------------------------

SAID = {                                  # fields that Qwen3.5's and Kimi-Linear's classes do not read, with what they change
    "gate": [("lower_bound", -5.0), ("gate_lower_bound", -5.0), ("kda_lower_bound", -5.0), ("linear_lower_bound", -1),
             ("kda_gate_lower_bound", -5.0), ("decay_lower_bound", -5.0), ("safe_gate", True), ("kda_safe_gate", True),
             ("use_safe_gate", 1), ("linear_safe_gate", True)],
    "beta_factor": [("allow_neg_eigval", True), ("kda_allow_neg_eigval", True), ("linear_allow_neg_eigval", True),
                    ("allow_negative_eigenvalues", True), ("linear_beta_scale", 2.0)],
    "activation": [("gate_activation", "tanh"), ("output_gate_type", "relu"), ("linear_output_gate_type", "relu"),
                   ("use_gate", False), ("kda_use_output_gate", False), ("linear_output_gate", False), ("gate_act", "gelu")],
    "norm_eps": [("linear_norm_eps", 0.5), ("o_norm_eps", 0.5)], "norm_offset": [("linear_norm_zero_centered", True)],
    None: [("use_short_conv", False), ("kda_use_short_conv", False), ("conv_activation", "relu"),
           ("use_qk_l2norm_in_kernel", True), ("use_qk_l2norm", False)]}


@pytest.mark.parametrize("family", ["qwen35", "kimi"])
def test_a_field_that_nobody_reads_and_that_means_another_layer_is_refused(family):
    case = Case(family)
    for way, fields in SAID.items():
        for name, value in fields:
            if name == "use_qk_l2norm_in_kernel":                    # what is done anyway
                read(case, {name: value})
                continue
            for config in ({name: value}, {"linear_attn_config": {name: value}},
                           {"text_config": case.config, name: value}, {"text_config": case.config | {name: value}}):
                with pytest.raises(ValueError, match=rf"config: {name} is {value!r}, which .* own class does not read"
                                   + (f".*overrides={{.*{way}" if way else "")):
                    read(case, config)
            with pytest.raises(ValueError, match=f"config: {name} is"):
                state_dict.read_layer(case.weights, "", SimpleNamespace(**case.config, **{name: value}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_that_means_what_is_done_passes(family):
    case = Case(family)
    layer, activation = read(case)[1], "sigmoid" if family == "kimi" else "swish"
    same = {name: None for fields in SAID.values() for name, _ in fields}
    same |= {"safe_gate": False, "kda_safe_gate": False, "gate_activation": activation, "use_gate": True, "use_short_conv": True,
             "linear_norm_eps": layer.norm_eps, "output_gate_type": activation, "attn_output_gate": True,
             "use_full_rank_gate": family != "kimi", "no_kda_lora": family != "kimi", "moe_gate_type": "top",
             "gated_attention_proj_granularity_type": "head_wise"}
    same["kda_allow_neg_eigval"] = family == "olmo"
    for name, value in same.items():
        assert read(case, {name: value})[1] == layer, name


def test_an_override_says_it():
    for config in ({"gate_lower_bound": -5.0}, {"linear_attn_config": {"safe_gate": True}}, {}):
        for gate in ("bounded", "clamped"):
            layer = read(KIMI, config, overrides={"gate": gate, "lower_bound": -5.0})[1]
            assert (layer.gate, layer.lower_bound) == (gate, -5.0)
    assert read(KIMI, {"gate_lower_bound": -5.0}, overrides={"gate": "softplus"})[1].lower_bound is None
    assert read(KIMI, {"allow_neg_eigval": True}, overrides={"beta_factor": 2})[1].beta_factor == 2
    assert gdn.KimiDeltaAttention.from_state_dict(KIMI.weights, "", KIMI.config, overrides=BOUNDED).config.gate == "bounded"
    with pytest.raises(ValueError, match="gate_lower_bound is -5.0"):        # that answers another question
        read(KIMI, {"gate_lower_bound": -5.0}, overrides={"beta_factor": 2})
    for overrides, message in (({"gate": "bounded"}, "needs a lower_bound"), ({"gate": "bounded", "lower_bound": 5.0}, "below 0"),
                               ({"gate_lower_bound": -5.0}, "overrides: gate_lower_bound cannot be said"),
                               ({"H_k": 6}, "overrides: H_k cannot")):
        with pytest.raises(ValueError, match=message):
            read(KIMI, overrides=overrides)


def test_the_gates_of_glm():
    """As its configuration class: a bound by default, none where it is null, and what linear_attn_config adds."""
    none = {"linear_lower_bound": None}
    for config, bound in (({}, -5.0), (none, None), ({"linear_lower_bound": -3.0}, -3.0),
                          ({"linear_attn_config": {"num_heads": 3, "head_dim": 32, "short_conv_kernel_size": 4}}, -5.0),
                          (none | {"linear_attn_config": {"num_heads": 3}}, -5.0),
                          (none | {"linear_attn_config": {"safe_gate": False}}, None),
                          ({"linear_attn_config": {"gate_lower_bound": -2.0}}, -2.0),
                          ({"linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}}, None),
                          ({"linear_attn_config": {"gate_lower_bound": None}}, -5.0)):
        layer = read(GLM, config)[1]
        assert (layer.gate, layer.lower_bound) == ("softplus" if bound is None else "bounded", bound), config
        theirs = optional("transformers").Glm5NextTextConfig(**GLM.config | config)
        assert theirs.linear_lower_bound == bound
        assert state_dict.read_layer(GLM.weights, "", theirs)[1].lower_bound == bound
        assert state_dict.read_layer(GLM.weights, "", theirs.to_dict())[1].lower_bound == bound
    for bound in (0.0, 5.0):
        with pytest.raises(ValueError, match="lower_bound is the least log decay"):
            read(GLM, {"linear_lower_bound": bound})


def test_the_gates_of_bailing():
    for config, bound in (({}, -5.0), ({"kda_lower_bound": -2.0}, -2.0), ({"kda_safe_gate": False}, None),
                          ({"kda_safe_gate": False, "kda_lower_bound": -2.0}, None)):
        assert read(BAILING, config)[1].lower_bound == bound
    layer = read(BAILING, {"no_kda_lora": False})[1]             # these weights are of low rank
    assert layer.f_rank == layer.g_rank == 32
    with pytest.raises(ValueError, match="no_kda_lora is True"):
        read(BAILING, {"no_kda_lora": True})


def test_the_output_gate_of_qwen4_exp():
    case = Case("qwen35")
    for said, activation in ((None, "silu"), ("silu", "silu"), ("swish", "silu"), ("sigmoid", "sigmoid")):
        layer = read(case, {"model_type": "qwen4_exp_text", "output_gate_type": said})[1]
        assert (layer.activation, layer.family) == (activation, "qwen4_exp")
    with pytest.raises(ValueError, match="output_gate_type is 'relu'"):
        read(case, {"model_type": "qwen4_exp", "output_gate_type": "relu"})


def test_the_output_gates_activation():
    """At a gate of -3 with rows that the norm leaves alone."""
    for activation, expected in (("silu", -0.14228), ("sigmoid", 0.04743)):
        x = np.ones((1, 4), np.float32)
        y = gdn.rms_norm_gated(x, -3 * x, x[0], 0.0, activation=activation)
        np.testing.assert_allclose(y, np.full((1, 4), expected), atol=5e-6)


# ---- head counts and sizes -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", FAMILIES)
def test_head_counts_are_said_and_right(family):
    case = Case(family)
    name = "linear_num_heads" if family == "kimi" else "linear_num_value_heads"
    n = case.layer.H_v * (2 if family == "qwen3next" else 1)             # its in_proj_ba has b and a
    with pytest.raises(ValueError, match=rf"has shape \({n},.* expected {4 * n}: .*H_v"):
        read(case, {name: 4 * case.layer.H_v})
    for name in case.config:
        if name.startswith("linear_") and name != "linear_allow_neg_eigval":
            with pytest.raises(ValueError, match=f"config lacks {name}"):
                read(case, {name: None})


def test_a_head_size_that_is_the_rotary_parts():
    for name in ("linear_head_dim", "linear_key_head_dim"):
        case = Case("kimi" if name == "linear_head_dim" else "qwen35")
        with pytest.raises(ValueError, match=f"config lacks {name}; head_dim, 64, is the other layers'"):
            read(case, {name: None, "head_dim": 64})
    with pytest.raises(ValueError, match=r"o_norm.weight has shape \(32,\), expected 16.*head_dim may be the rotary part's"):
        read(BAILING, {"head_dim": 16})
    assert read(BAILING, {"head_dim": 16, "linear_head_dim": 32})[1].S_k == 32       # as a configuration is saved


# ---- tensors ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_are_not_what_they_seem(family):
    """Codes without their scale, in torch's types and in numpy's, and numbers that float32 does not hold."""
    torch, ml_dtypes, case = optional("torch"), optional("ml_dtypes"), Case(family)
    name = next(n for n in case.weights if n.endswith("out_proj.weight") or n.endswith("o_proj.weight"))
    x = case.weights[name]
    for codes in (torch.from_numpy(x).to(torch.float8_e4m3fn), torch.from_numpy(x).to(torch.float8_e5m2),
                  x.astype(ml_dtypes.float8_e4m3fn), x.astype(ml_dtypes.float8_e8m0fnu), x.astype(np.int8), x.astype(np.uint8),
                  x.astype(complex), torch.from_numpy(x).to(torch.int8), x.astype(object)):
        with pytest.raises(TypeError, match=f"weights: {name} must be float16.*scale"):
            read(case, weights={name: codes})
        with pytest.raises((TypeError, ValueError), match="weights: "):
            read(case, weights={name: codes, name + "_scale_inv": np.ones((1, 1), np.float32)})
    for number in (1e39, -1e300):
        wide = x.astype(np.float64)
        wide[0, 3] = number
        for weights in (wide, torch.from_numpy(wide)):
            with pytest.raises(ValueError, match=f"weights: {name} holds .*beyond float32's range"):
                read(case, weights={name: weights})
    wide[0, 3] = x[0, 3]
    assert same_bits(read(case, weights={name: wide})[0]["out"], x)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_parameters_of_a_bfloat16_checkpoint_stay(family):
    torch, case = optional("torch"), Case(family)
    weights = {name: torch.from_numpy(w).bfloat16() for name, w in case.weights.items()}
    name = next(n for n in weights if n.endswith("A_log"))
    weights[name] = torch.full(weights[name].shape, 2.7700)
    w, _ = state_dict.read_layer(weights, "", case.config)
    assert same_bits(w["A"], np.full(case.layer.H_v, -np.exp(np.float32(2.77))))
    assert all(x.dtype == np.float32 for x in w.values())


def test_padded_and_absent_rates():
    """A_log counts as many values as there are heads; a bounded gate without one has A = -1."""
    name, A_log = "forget_gate.A_log", KIMI.weights["forget_gate.A_log"]
    padded = np.concatenate([A_log.ravel(), [np.nan] * 5]).astype(np.float32)
    for x in (padded, padded.reshape(1, 1, 8, 1)):
        assert same_bits(read(KIMI, weights={name: x})[0]["A"], KIMI.layer.A)
    with pytest.raises(ValueError, match="A_log has shape .*expected"):
        read(KIMI, weights={name: A_log.ravel()[:2]})
    with pytest.raises(ValueError, match="A_log has shape .*expected"):              # other families' are never padded
        read(Case("qwen35"), weights={"A_log": np.zeros(8, np.float32)})
    without = {n: w for n, w in KIMI.weights.items() if n != name}
    assert (state_dict.read_layer(without, "", GLM.config)[0]["A"] == -1).all()
    with pytest.raises(ValueError, match="weights lack A_log"):
        state_dict.read_layer(without, "", KIMI.config)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sign_of_the_rate(family):
    case = Case(family)
    weights, config = read(case)
    for bad in (1.0, 1e-30, np.nan, np.inf):
        A = weights["A"].copy()
        A[1] = bad
        with pytest.raises(ValueError, match="weights: A must be -exp"):
            type(case.layer)(weights | {"A": A}, config)
    type(case.layer)(weights | {"A": np.array([0, -0.0, -np.inf, -1][:case.layer.H_v], np.float32)}, config)
    name = next(n for n in case.weights if n.endswith("A_log"))
    with pytest.raises(ValueError, match="A_log holds NaN"):
        read(case, weights={name: np.full_like(case.weights[name], np.nan)})


@pytest.mark.parametrize("family", FAMILIES)
def test_conv_weights_with_unit_axes_anywhere(family):
    """The same layer from (C, 1, w), (C, w), (1, C, w), (C, w, 1); transposed is refused."""
    case = Case(family)
    conv = case.weights["conv1d.weight"]
    C, w = conv.size // conv.shape[-1], conv.shape[-1]
    for shape in ((C, w), (C, 1, w), (1, C, w), (C, w, 1), (C, 1, w, 1)):
        assert same_bits(read(case, weights={"conv1d.weight": conv.reshape(shape)})[0]["conv"], case.layer.conv)
    for shape in ((w, C), (w, 1, C), (C * w,)):
        with pytest.raises(ValueError, match="conv1d.weight has shape .*expected"):
            read(case, weights={"conv1d.weight": conv.reshape(shape)})


def test_as_many_channels_as_taps():
    """Channels and width of 4: the first axis counts channels."""
    rng = np.random.default_rng(0)
    conv = rng.standard_normal((4, 4)).astype(np.float32)
    shapes = {"in_proj_qkv": (4, 8), "in_proj_z": (2, 8), "in_proj_b": (1, 8), "in_proj_a": (1, 8), "norm": (2,),
              "out_proj": (8, 2)}
    weights = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    weights |= {"A_log": np.zeros(1, np.float32), "dt_bias": np.zeros(1, np.float32)}
    config = {"model_type": "qwen3_5", "hidden_size": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 1,
              "linear_key_head_dim": 1, "linear_value_head_dim": 2, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6}
    for x in (conv, conv[:, None], conv[None], conv[..., None]):
        assert same_bits(state_dict.read_layer(weights | {"conv1d.weight": x}, "", config)[0]["conv"], conv)


def test_a_norm_of_ones_is_one():
    """The gated norm's weight is no offset from one, in any source; a zero-centred one is said to be."""
    for family in FAMILIES:
        case = Case(family)
        name = next(n for n in case.weights if n.endswith("norm.weight"))
        weights, config = read(case, weights={name: np.ones_like(case.weights[name])})
        assert (weights["norm"] == 1).all() and (type(case.layer)(weights, config).norm == 1).all()


def test_zero_centred_norms_and_doubled_gates():
    """norm_offset and output_gate_factor, on a KDA layer with a clamped gate and beta to 2, against the reference."""
    weights, config = read(KIMI, overrides={"gate": "clamped", "lower_bound": -0.7, "beta_factor": 2.0, "norm_offset": 1.0,
                                            "output_gate_factor": 2.0})
    layer, ring, trace = gdn.KimiDeltaAttention(weights, config), KIMI.ring(), {}
    ring.acquire(0)
    batch = gdn.Batch([0] * 40)
    with ring.begin(batch) as step:
        layer(KIMI.x[:40], batch, step, 0, trace=trace)
    ref = gdn.reference
    x = trace["a"].astype(np.float64) + weights["dt_bias"].reshape(3, 32)
    gate = np.maximum(weights["A"][:, None] * ref.softplus(x), -0.7)
    assert (gate == -0.7).any() and (gate > -0.7).any()
    assert_close(trace["gate"], gate, "gate")
    beta = 2 * ref.sigmoid(trace["b"].astype(np.float64))
    assert_close(trace["beta"], beta, "beta")
    (out,), _ = ref.recurrent(*(z[None].astype(np.float64) for z in (trace["q"], trace["k"], trace["v"], gate, beta)))
    assert_close(trace["attn_output"], out, "the delta rule")
    normed = out / np.sqrt((out**2).mean(-1, keepdims=True) + config.norm_eps) * (1 + weights["norm"].astype(np.float64))
    assert_close(trace["attn_out_norm"], normed * 2 * ref.sigmoid(trace["z"].astype(np.float64)), "the norm")


# ---- names -----------------------------------------------------------------------------------------------------------

def test_lara_minis_fused_projection():
    case = Case("qwen35")
    config = {"model_type": "lara_mini"}
    weights, layer = read(case, config)
    fused = {name: w for name, w in case.weights.items() if "in_proj" not in name and name != "norm.weight"}
    fused["in_proj.weight"] = np.concatenate([case.weights[f"in_proj_{x}.weight"] for x in ("qkv", "z", "b", "a")])
    fused["out_norm.weight"] = case.weights["norm.weight"]
    again, config = state_dict.read_layer(fused, "", case.config | config)
    assert set(again) == set(weights) and all(same_bits(again[name], weights[name]) for name in weights)
    assert config.family == layer.family == "lara_mini" and config.projections == {"in_proj": "qkvzba", "out_proj": "out"}
    with pytest.raises(ValueError, match="in_proj_z.weight of no known use"):
        state_dict.read_layer(fused | {"in_proj_z.weight": case.weights["in_proj_z.weight"]}, "", case.config)
    with pytest.raises(ValueError, match="in_proj.weight has shape"):
        state_dict.read_layer(fused | {"in_proj.weight": fused["in_proj.weight"][1:]}, "", case.config)


def test_bailings_checkpoint_names():
    """attention.dense, unprefixed gates of full rank, separate convolutions."""
    names = {"forget_gate.A_log": "A_log", "forget_gate.dt_bias": "dt_bias", "o_proj.weight": "dense.weight"}
    weights = {"attention." + names.get(name, name): w for name, w in KIMI.weights.items()
               if "f_a_proj" not in name and "f_b_proj" not in name and "g_" not in name and "conv" not in name}
    for x, part in zip("qkv", np.split(KIMI.weights["conv1d.weight"], 3), strict=True):
        weights[f"attention.{x}_conv1d.weight"] = part
    for name, low in (("f", "forget_gate.f"), ("g", "g")):
        weights[f"attention.{name}_proj.weight"] = KIMI.weights[f"{low}_b_proj.weight"] @ KIMI.weights[f"{low}_a_proj.weight"]
    layer = gdn.KimiDeltaAttention.from_state_dict(weights, "attention.", BAILING.config | {"kda_safe_gate": False})
    assert layer.f_rank is None and layer.g_rank is None and not layer.low_rank
    case = Case("kimi")
    case.layer = layer
    assert_close(one_sequence(case.ring(), case, [30, 45]), case.y, "products of the low-rank gates", 2e-5)


# ---- LoRA ------------------------------------------------------------------------------------------------------------

def checkpoint_pairs(shapes, rng):
    return {name: [(0.2 * rng.standard_normal((r, n_in), np.float32), 0.2 * rng.standard_normal((n_out, r), np.float32), 0.5)
                   for r in (2, 3)] for name, (n_out, n_in) in shapes.items()}


def merged(weights, lora):
    """A checkpoint's weights with its adapter in them."""
    return weights | {f"{name}.weight": (weights[f"{name}.weight"] + sum(s * B @ A for A, B, s in pairs)).astype(np.float32)
                      for name, pairs in lora.items()}


def output(layer, x):
    ring = gdn.StateRing.create(1, n_layers=1, **layer.extents)
    ring.acquire(0)
    batch = gdn.Batch([0] * len(x))
    with ring.begin(batch) as step:
        return layer(x, batch, step, 0)


def test_an_adapter_of_the_checkpoint_on_a_file_of_tiled_heads():
    """One adapter in the checkpoint's order: the file's layer gives what the checkpoint's merged weights give."""
    case, rng = Case("qwen35"), np.random.default_rng(3)
    slots = {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_a": "a", "in_proj_b": "b", "out_proj": "out"}
    lora = checkpoint_pairs({name: case.weights[f"{name}.weight"].shape for name in slots}, rng)
    want = output(gdn.GatedDeltaNet.from_state_dict(merged(case.weights, lora), "", case.config), case.x)
    by_slot = {slots[name]: pairs for name, pairs in lora.items()}
    for layer in (gdn.GatedDeltaNet.from_gguf(DATA / "qwen35.gguf", 1, lora=by_slot),
                  gdn.GatedDeltaNet.from_state_dict(case.weights, "", case.config, lora),
                  gdn.GatedDeltaNet.from_state_dict(case.weights, "", case.config, lora, lora_order="file")):
        assert_close(output(layer, case.x), want, "an adapter in the checkpoint's order", 1e-5)
    wrong = gdn.GatedDeltaNet.from_gguf(DATA / "qwen35.gguf", 1, lora=by_slot, lora_order="file")
    assert np.abs(output(wrong, case.x) - want).max() > 0.01 * np.abs(want).max()


def test_grouped_pairs_on_a_file_of_tiled_heads():
    """qkvz and ba count heads by key head, as only a checkpoint does."""
    case, rng = Case("qwen35"), np.random.default_rng(4)
    weights, config = read(case)
    groups = {"qkvz": config.channels + config.H_v * config.S_v, "ba": 2 * config.H_v}
    lora = checkpoint_pairs({name: (n, 64) for name, n in groups.items()}, rng)
    want = output(gdn.GatedDeltaNet(weights, config, lora), case.x)
    assert_close(output(gdn.GatedDeltaNet.from_gguf(DATA / "qwen35.gguf", 1, lora), case.x), want, "grouped pairs", 1e-5)
    for name in lora:
        with pytest.raises(ValueError, match=f"{name} is grouped per key head, the layer's value heads are tiled"):
            gdn.GatedDeltaNet.from_gguf(DATA / "qwen35.gguf", 1, {name: lora[name]}, lora_order="file")


@pytest.mark.parametrize("H_k, r", [(2, 2), (3, 2), (2, 5), (1, 4), (4, 1)])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_either_order_of_heads_equals_merged_weights(kind, H_k, r):
    """Every projection, of full and low rank: pairs in the checkpoint's order and in the file's, to 1e-5."""
    from gdn import weight_layouts

    rng = np.random.default_rng(H_k * r)
    base = gdn.LayerConfig(kind=kind, n_embd=16, H_k=H_k, H_v=H_k * r, S_k=8, S_v=12, width=3, head_map="interleaved",
                           norm_eps=1e-5, activation="silu", f_rank=5 if kind == "kda" else None,
                           g_rank=4 if kind == "kda" else None)
    tiled = gdn.LayerConfig(**{**vars(base), "head_map": "tiled"})
    cls = gdn.KimiDeltaAttention if kind == "kda" else gdn.GatedDeltaNet
    shapes = weight_layouts.shapes(base)
    names = [*weight_layouts.inputs(base), *(("f_b", "g_b") if kind == "kda" else ()), "out"]
    weights = {name: rng.standard_normal(shapes[name], np.float32) * 0.3 for name in (*names, "conv", "A", "dt_bias", "norm")}
    weights["A"] = -np.abs(weights["A"])
    lora = checkpoint_pairs({name: shapes[name] for name in names}, rng)
    together = weights | {name: weights[name] + sum(s * B @ A for A, B, s in pairs) for name, pairs in lora.items()}

    def tile(name, x):
        if name in ("f_a", "g_a", "norm"):
            return x
        return weight_layouts.tile(name, x, base, axis=1 if name == "out" else 0)

    x = rng.standard_normal((20, 16), np.float32)
    want = output(cls(together, base), x)
    file = {name: tile(name, w) for name, w in weights.items()}
    assert_close(output(cls({name: tile(name, w) for name, w in together.items()}, tiled), x), want, "tiled weights", 1e-5)
    assert_close(output(cls(file, tiled, lora), x), want, "the checkpoint's order", 1e-5)
    in_file = {name: [(tile(name, A) if name == "out" else A, B if name == "out" else tile(name, B), s) for A, B, s in pairs]
               for name, pairs in lora.items()}
    assert_close(output(cls(file, tiled, in_file, "file"), x), want, "the file's order", 1e-5)
    for order in ("grouped", None, 1):
        with pytest.raises(ValueError, match='lora_order must be "checkpoint" or "file"'):
            cls(file, tiled, lora, order)


def test_weights_grouped_by_key_head_on_tiled_heads_are_refused():
    case = Case("qwen3next")
    grouped = {"qkvz": case.weights["in_proj_qkvz.weight"], "ba": case.weights["in_proj_ba.weight"]}
    weights, config = read(case)
    for name, parts in (("qkvz", ("qkv", "z")), ("ba", ("b", "a"))):
        with pytest.raises(ValueError, match=f"{name} is grouped per key head"):
            gdn.GatedDeltaNet({n: w for n, w in weights.items() if n not in parts} | {name: grouped[name]},
                              config.override({"head_map": "tiled"}))


# ---- tags ------------------------------------------------------------------------------------------------------------

def test_the_tag_of_a_source():
    """One model from two sources of one head order has one tag; another order, another tag."""
    layers = {family: Case(family).layer for family in FAMILIES}
    assert len({layer.tag for layer in layers.values()}) == len(layers)
    assert all(layer.tag == layer.config.tag != 0 for layer in layers.values())
    assert gdn.GatedDeltaNet.from_gguf(DATA / "qwen3next.gguf", 1).tag == layers["qwen3next"].tag
    assert gdn.GatedDeltaNet.from_gguf(DATA / "qwen35.gguf", 1).tag != layers["qwen35"].tag
    assert family_class("kimi").from_state_dict(KIMI.weights, "", GLM.config).tag != layers["kimi"].tag


def test_a_state_of_another_order_of_heads_is_refused():
    """A tiled layer's saved state and an interleaved layer's ring, in either direction; of one order, it loads."""
    tiled = gdn.GatedDeltaNet.from_gguf(DATA / "qwen35.gguf", 1)
    other = Case("qwen35").layer
    assert tiled.extents == {**other.extents, "head_map": "tiled"} != other.extents

    def ring_of(layer):
        return gdn.StateRing.create(2, n_layers=1, **layer.extents, tag=layer.tag)

    for layer, wrong in ((tiled, other), (other, tiled)):
        ring = ring_of(layer)
        ring.acquire(0)
        batch = gdn.Batch([0] * 5)
        with ring.begin(batch) as step:
            layer(Case("qwen35").x[:5], batch, step, 0)
        saved = ring.save(0)
        with pytest.raises(ValueError, match="tag"):
            ring_of(wrong).load(0, saved)
        again = ring_of(layer)
        again.load(0, saved)
        assert again.position(0) == 5
