"""Small GGUF files of every architecture, written for the tests."""

import numpy as np
from gguf import GGUFWriter
from gguf.quants import quantize

GDN_KEYS = {"qkv", "z", "b", "a", "conv", "A", "dt_bias", "norm", "out"}
KDA_KEYS = {"qkv", "b", "conv", "A", "dt_bias", "norm", "out", "f_a", "f_b", "g_a", "g_b"}
E, H_K, H_V, S_K, S_V, WIDTH = 32, 2, 6, 8, 16, 3
C, INNER = 2 * H_K * S_K + H_V * S_V, H_V * S_V
SHAPES = {"ssm_a": (H_V,), "ssm_dt.bias": (H_V,), "ssm_conv1d.weight": (C, WIDTH), "ssm_norm.weight": (S_V,),
          "ssm_out.weight": (E, INNER), "attn_qkv.weight": (C, E), "attn_gate.weight": (INNER, E)}
FORMS = {"qwen3next": SHAPES | {"ssm_ba.weight": (2 * H_V, E)},
         "qwen35": SHAPES | {"ssm_beta.weight": (H_V, E), "ssm_alpha.weight": (H_V, E)}}
META = {"block_count": 2, "embedding_length": E, "ssm.conv_kernel": WIDTH, "ssm.state_size": S_K,
        "ssm.group_count": H_K, "ssm.time_step_rank": H_V, "ssm.inner_size": INNER,
        "attention.layer_norm_rms_epsilon": 1e-5}
H, S, RANK = 3, 16, 4
KIMI = {"ssm_a": (1, H, 1), "ssm_dt.bias": (H * S,), "ssm_norm.weight": (S,), "attn_output.weight": (E, H * S),
        "ssm_beta.weight": (H, E)}
KIMI |= {f"attn_{x}.weight": (H * S, E) for x in "qkv"} | {f"ssm_conv1d_{x}.weight": (H * S, 1, 4) for x in "qkv"}
KIMI |= {f"ssm_{x}_a.weight": (RANK, E) for x in "fg"} | {f"ssm_{x}_b.weight": (H * S, RANK) for x in "fg"}
KIMI_META = {"block_count": 2, "embedding_length": E, "ssm.conv_kernel": 4, "kda.head_dim": S,
             "attention.head_count": H, "attention.layer_norm_rms_epsilon": 1e-5}


def random_tensors(shapes, rng):
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return tensors | {"ssm_a": -np.abs(tensors["ssm_a"])}


def write(path, arch, meta, tensors, il=1, types=None):
    """A GGUF file of one block; `tensors` without the block's prefix, `types` by tensor name."""
    writer = GGUFWriter(path, arch)
    for key, value in meta.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key if "." in key and key.split(".")[0] in ("general", "split") else f"{arch}.{key}", value)
    for name, data in tensors.items():
        qtype = (types or {}).get(name)
        writer.add_tensor(f"blk.{il}.{name}", data if qtype is None else data_of(data, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def data_of(data, qtype):
    return data if data.dtype == np.uint8 else quantize(data, qtype)
