"""Adapters in folders that the peft library has saved, on layers of either order of heads."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from helpers import assert_close, missing, same_bits
from transformers_layers import FAMILIES, FIXED, build, load, module_of, ours

import gdn
from gdn import weight_layouts
from gdn.adapters.peft import SLOTS, from_peft

try:
    import peft
    import torch
    from safetensors.numpy import load_file, save_file
except ImportError as error:
    missing(error)

FIELDS = {"hidden_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
          "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
          "head_dim": 8, "vocab_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
          "layer_types": ["linear_attention", "full_attention"]}
TARGETS = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]


def saved(path, **options):
    """A tiny Qwen3.5 with random pairs on it, saved by peft.  The model's configuration and the merged model's weights."""
    module = module_of("qwen3_5")
    config = module.Qwen3_5TextConfig(**FIELDS)
    torch.manual_seed(3)
    lora = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": TARGETS, "init_lora_weights": False} | options)
    base = module.Qwen3_5ForCausalLM(config)
    weights = {name: w.clone() for name, w in base.state_dict().items()}
    model = peft.get_peft_model(base, lora)
    model.save_pretrained(path)
    return config, weights, model.merge_and_unload().state_dict()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapter")
    saved(path)
    return path


def fresh(tmp_path, folder):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)


def change(folder, fields=None, tensors=None):
    """Other fields or tensors in the folder's files."""
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | (fields or {})))
    if tensors:
        whole = load_file(folder / "adapter_model.safetensors") | tensors
        save_file({name: x for name, x in whole.items() if x is not None}, folder / "adapter_model.safetensors")


@pytest.mark.parametrize("options", [
    {}, {"use_rslora": True},
    {"rank_pattern": {"in_proj_z": 2, "linear_attn.out_proj": 7}, "alpha_pattern": {"in_proj_[ab]": 1.5}},
    {"rank_pattern": {"in_proj_z": 2}, "alpha_pattern": {"model.layers.0.linear_attn.in_proj_z": 9}, "use_rslora": True},
    {"target_modules": [*TARGETS, "q_proj", "gate_proj"]}], ids=str)
def test_a_folder_equals_merged_weights(tmp_path, options):
    """On the checkpoint's layer, and on one whose value heads are tiled as GGUF files have them."""
    config, weights, merged = saved(tmp_path, **options)
    prefix, x = "model.layers.0.linear_attn.", np.random.default_rng(0).standard_normal((20, 16), np.float32)
    want = ours(gdn.GatedDeltaNet.from_state_dict(merged, prefix, config), x, [20])
    adapter = from_peft(tmp_path)
    layer = gdn.GatedDeltaNet.from_state_dict(weights, prefix, config, adapter[0])
    assert_close(ours(layer, x, [20]), want, "the adapter", 1e-5)
    without = ours(gdn.GatedDeltaNet.from_state_dict(weights, prefix, config), x, [20])
    assert np.abs(without - want).max() > 0.01 * np.abs(want).max()
    flat, layer_config = gdn.adapters.state_dict.read_layer(weights, prefix, config)
    tiled = {name: w if name == "norm" else weight_layouts.tile(name, w, layer_config, int(name == "out"))
             for name, w in flat.items()}
    layer = gdn.GatedDeltaNet(tiled, replace(layer_config, head_map="tiled"), adapter[0])
    assert_close(ours(layer, x, [20]), want, "the adapter on tiled heads", 1e-5)
    others = [f"model.layers.{i}.mlp.gate_proj" for i in (0, 1)] if "target_modules" in options else []
    assert sorted(adapter.others) == others and set(adapter) == ({0, 1} if others else {0})


@pytest.mark.parametrize("prefix", ["", "base_model.model.", "base_model.model.model.language_model.", "language_model.model."])
def test_names_with_and_without_prefixes(tmp_path, folder, prefix):
    fresh(tmp_path, folder)
    whole = load_file(tmp_path / "adapter_model.safetensors")
    again = {name.replace("base_model.model.model.", prefix).replace("lora_A.", "lora_A.default."): x
             for name, x in whole.items()}
    expected = from_peft(tmp_path)
    save_file(again, tmp_path / "adapter_model.safetensors")
    adapter = from_peft(tmp_path)
    assert set(adapter[0]) == set(expected[0]) == {"qkv", "z", "b", "a", "out"}
    assert all(same_bits(x, y) for slot in adapter[0] for x, y in zip(adapter[0][slot][0], expected[0][slot][0], strict=True))


def test_another_stack_of_layers_is_not_this_one(tmp_path, folder):
    fresh(tmp_path, folder)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name.replace("model.model.model.", "model.model.mtp."): x for name, x in load_file(file).items()}, file)
    adapter = from_peft(tmp_path)
    assert not adapter and len(adapter.others) == 5
    assert all(name.startswith("mtp.layers.0.linear_attn.") for name in adapter.others)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_tensors_are_widened(tmp_path, folder, dtype):
    from safetensors.torch import load_file, save_file

    fresh(tmp_path, folder)
    whole = {name: x.to(getattr(torch, dtype)) for name, x in load_file(tmp_path / "adapter_model.safetensors").items()}
    save_file(whole, tmp_path / "adapter_model.safetensors")
    A, B, _ = from_peft(tmp_path)[0]["z"][0]
    for x, half in ((A, "A"), (B, "B")):
        assert same_bits(x, whole[f"base_model.model.model.layers.0.linear_attn.in_proj_z.lora_{half}.weight"].float().numpy())


@pytest.mark.parametrize("field, value", [
    ("use_dora", True), ("bias", "all"), ("bias", "lora_only"), ("modules_to_save", ["lm_head"]), ("fan_in_fan_out", True),
    ("lora_bias", True), ("peft_type", "LOHA"), ("peft_type", "IA3"), ("init_lora_weights", "pissa"),
    ("init_lora_weights", "pissa_niter_4"), ("init_lora_weights", "olora"), ("init_lora_weights", "loftq"),
    ("init_lora_weights", "corda"), ("loftq_config", {"loftq_bits": 4}), ("layer_replication", [[0, 2]]),
    ("trainable_token_indices", [1]), ("alora_invocation_tokens", [1]), ("use_qalora", True), ("target_parameters", ["x"]),
    ("kasa_config", {"x": 1}), ("monteclora_config", {"x": 1}), ("something_of_next_year", True)])
def test_what_means_more_is_refused(tmp_path, folder, field, value):
    fresh(tmp_path, folder)
    change(tmp_path, {field: value})
    with pytest.raises(ValueError, match=f"adapter: {field} is"):
        from_peft(tmp_path)


def test_what_changes_nothing_passes(tmp_path, folder):
    fresh(tmp_path, folder)
    change(tmp_path, {"lora_dropout": 0.3, "init_lora_weights": "gaussian", "task_type": "CAUSAL_LM", "revision": "main",
                      "layers_to_transform": [0], "something_of_next_year": None, "use_dora": False, "modules_to_save": []})
    assert len(from_peft(tmp_path)[0]) == 5


def test_tensors_that_do_not_fit_are_refused(tmp_path, folder):
    fresh(tmp_path, folder)
    name = "base_model.model.model.layers.0.linear_attn.in_proj_z.lora_"
    ones = np.ones((4, 16), np.float32)
    for tensors, message in (
            ({name + "magnitude_vector.weight": ones}, "is no A or B"), ({name + "B.bias": ones}, "is no A or B"),
            ({"base_model.model.lm_head.weight": ones}, "is no A or B"), ({name + "B.weight": None}, "in_proj_z has A alone"),
            ({name + "A.weight": ones[:2]}, r"shape \(2, 16\), the configuration says rank 4"),
            ({name + "A.weight": ones[:, :, None]}, "shape .*rank 4"), ({name + "A.other.weight": ones}, "has A twice")):
        fresh(tmp_path, folder)
        change(tmp_path, tensors=tensors)
        with pytest.raises(ValueError, match=message):
            from_peft(tmp_path)
    for x in (ones.astype(np.float64), ones.astype(np.int8)):
        fresh(tmp_path, folder)
        change(tmp_path, tensors={name + "A.weight": x})
        with pytest.raises(TypeError, match="expected F32, F16 or BF16"):
            from_peft(tmp_path)
    for missing_field in ("r", "lora_alpha", "peft_type"):
        fresh(tmp_path, folder)
        change(tmp_path, {missing_field: None})
        with pytest.raises(ValueError, match=f"{missing_field}"):
            from_peft(tmp_path)
    fresh(tmp_path, folder)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(OSError, match="adapter_model.safetensors"):
        from_peft(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_modules_names(family):
    """What transformers' modules call their projections is what an adapter's names are."""
    mixer, config = build(family, FIXED[family], 1)
    slots = {SLOTS[name] for name, part in mixer.named_modules() if isinstance(part, torch.nn.Linear)}
    assert slots == set(load(family, mixer, config).projections.values())
