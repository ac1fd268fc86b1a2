"""Whole random models of every family that transformers has, tiny by default."""

import importlib

import torch

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
KDA_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
           "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
           "indexer_compress_ratio": 4}
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}

# Family: its config's class, what the config needs beyond COMMON, the model's class.
FAMILIES = {
    "qwen3_next": ("Qwen3NextConfig", {**MOE, "mlp_only_layers": [0, 1, 2]}, "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", {}, "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", MOE, "Qwen3_5MoeForCausalLM"),
    "qwen4_exp": ("Qwen4ExpTextConfig", {**MOE, "hc_count": 2, "hc_lowrank": 8, "output_gate_type": "sigmoid", **INDEXER},
                  "Qwen4ExpForCausalLM"),
    "lara_mini": ("LaraMiniConfig", MOE, "LaraMiniForCausalLM"),
    "olmo_hybrid": ("OlmoHybridConfig", {}, "OlmoHybridForCausalLM"),
    "kimi_linear": ("KimiLinearConfig", KDA_MOE, "KimiLinearForCausalLM"),
    "glm5_next": ("Glm5NextTextConfig", {**KDA_MOE, "n_routed_experts": 4, "q_lora_rank": 16, "qk_rope_head_dim": 0,
                                         "index_topk": 64, "index_head_dim": 8, "index_n_heads": 2, "index_kpool": 4,
                                         "hc_mult": 2}, "Glm5NextForConditionalGeneration"),
    "bailing_hybrid": ("BailingHybridConfig", KDA_MOE, "BailingHybridForCausalLM"),
}
KDA = ("kimi_linear", "glm5_next", "bailing_hybrid")


def config_of(family, n_layers=3, **sizes):
    """A config of n_layers, the last with full attention, the others linear."""
    name, extra, _ = FAMILIES[family]
    full = "indexed_attention" if family == "glm5_next" else "full_attention"
    common = {"hidden_size": 32, "num_hidden_layers": n_layers, "num_attention_heads": 2, "num_key_value_heads": 2,
              "vocab_size": 64, "intermediate_size": 48, "head_dim": 16, "max_position_embeddings": 4096,
              "layer_types": ["linear_attention"] * (n_layers - 1) + [full], "pad_token_id": 0, "bos_token_id": 1,
              "eos_token_id": None}
    if family in KDA:
        common |= {"linear_num_heads": 2, "linear_head_dim": 16, "linear_conv_kernel_dim": 4, "first_k_dense_replace": n_layers,
                   "mlp_layer_types": ["dense"] * n_layers}
    else:
        common |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                   "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4}
    if family == "bailing_hybrid":
        common |= {"short_conv_kernel_size": 4}
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    return getattr(module, name)(**{**common, **extra, **sizes})


def build(family, seed=0, attention="sdpa", **sizes):
    """A model in evaluation mode whose random weights keep every part of it at work."""
    config = config_of(family, **sizes)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if family == "glm5_next":
        configs = importlib.import_module("transformers.models.glm5_next.configuration_glm5_next")
        config = configs.Glm5NextConfig(text_config=config.to_dict(), vision_config=VISION)
    torch.manual_seed(seed)
    config._attn_implementation = attention
    model = getattr(module, FAMILIES[family][2])(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-2, 1)
            elif name.endswith("dt_bias"):
                p.uniform_(-3, 1)
            elif "norm" in name and p.ndim == 1:
                p.uniform_(0.5, 1.5) if not name.endswith("bias") else p.zero_()
            elif p.ndim >= 2:
                p.normal_(0, 0.4 if "conv" in name else 1.2 * p.shape[-1]**-0.5)
    return model
