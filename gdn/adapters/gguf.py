"""Linear-attention layers of GGUF files: qwen3next, qwen35, qwen35moe and kimi-linear, as llama.cpp stores them.

Needs the `gguf` package.  Value heads are taken in the order of the file (tiled in qwen35 and qwen35moe, interleaved
in qwen3next); projections that a file fuses per key head are taken apart.
"""

import math
import operator
import re
from dataclasses import asdict, replace

from gdn import weight_layouts
from gdn.adapters._gguf_file import GGUFFile
from gdn.layer_config import LayerConfig

FAMILIES = {"qwen3next": "qwen3_next", "qwen35": "qwen3_5", "qwen35moe": "qwen3_5", "kimi-linear": "kimi_linear"}
HEAD_MAPS = {"qwen3next": "interleaved", "qwen35": "tiled", "qwen35moe": "tiled", "kimi-linear": "interleaved"}


def read_layer(path, il, overrides=None):
    """Weights and `gdn.LayerConfig` of block ``il``, as `GatedDeltaNet` and `KimiDeltaAttention` take them.

    Weights are float32, rows are outputs; F32, F16, BF16 and every quantised type that the `gguf` package can
    dequantise are read.  ValueError for a file that is no GGUF file, is truncated or damaged, for a block that it
    lacks or that is no linear attention, and for tensors missing or of other shapes than the metadata says.
    """
    try:
        il = operator.index(il)
    except TypeError:
        raise TypeError(f"il must be an integer, got {il!r}") from None
    with GGUFFile(path) as file:
        n_layers = _n_layers(file)
        if not 0 <= il < n_layers:
            raise file.error(f"il is {il}, the model has blocks 0 to {n_layers - 1}")
        if il not in _linear_layers(file):
            raise file.error(f"block {il} is no linear-attention layer; those are {_linear_layers(file)}")
        config = _config(file, il).override(overrides)
        tensors = _tensors(file, il, config)
        weights = {key: file.read(*tensor) for key, tensor in tensors.items()}
    names = {name.split(".")[2]: key for key, (name, _) in tensors.items() if key in (*PROJECTIONS, "out")}
    return weight_layouts.flat(weights, config), replace(config, projections=names)


def describe(path):
    """One dict for each linear-attention layer of the file, read from its header alone.

    The configuration as of `read_layer`, with ``il``, ``arch``, ``form`` (the projections' tensors), ``types`` (the
    tensors' types) and ``state_bytes``: float32 bytes of one sequence, ``conv_bytes`` and ``ssm_bytes`` together.
    Errors as of `read_layer`.
    """
    from gguf.constants import GGMLQuantizationType

    names = {type.value: type.name for type in GGMLQuantizationType}
    layers = []
    with GGUFFile(path) as file:
        for il in _linear_layers(file):
            config = _config(file, il)
            tensors = _tensors(file, il, config)
            types = {names.get(file.require(*tensor).type, "unknown") for tensor in tensors.values()}
            form = [name.split(".")[2] for key, (name, _) in tensors.items() if key in PROJECTIONS]
            conv = 4 * config.channels * (config.width - 1)
            ssm = 4 * config.H_v * config.S_k * config.S_v
            layers.append({"il": il, "arch": _arch(file), "form": " + ".join(form), "types": sorted(types), **asdict(config),
                           "conv_bytes": conv, "ssm_bytes": ssm, "state_bytes": conv + ssm})
    return layers


def inspect(path):
    """The text of `python -m gdn inspect`, a paragraph for each linear-attention layer.  Errors as of `read_layer`."""
    layers = describe(path)
    if not layers:
        return f"{path}: no linear-attention layers"
    total = sum(layer["state_bytes"] for layer in layers)
    lines = [f"{path}: {layers[0]['arch']}, {len(layers)} linear-attention layers, {total:,} bytes of state a sequence"]
    for layer in layers:
        lines.append(PARAGRAPH.format(**layer | {"types": ", ".join(layer["types"])}))
    return "\n".join(lines)


PARAGRAPH = """\
layer {il}: {kind}, {form} ({types})
    n_embd {n_embd}, H_k {H_k}, H_v {H_v}, S_k {S_k}, S_v {S_v}, width {width}, head map {head_map}
    state {state_bytes:,} bytes a sequence: conv {conv_bytes:,}, ssm {ssm_bytes:,}"""
PROJECTIONS = ("qkvz", "q", "k", "v", "qkv", "z", "ba", "b", "a", "f_a", "f_b", "g_a", "g_b")


def _arch(file):
    arch = file.meta.get("general.architecture")
    if not isinstance(arch, str) or arch not in HEAD_MAPS:
        raise file.error(f"general.architecture is {arch!r}, expected one of {', '.join(HEAD_MAPS)}")
    return arch


def _whole(file, key):
    """A positive whole number of the metadata, small enough that products of a few stay exact."""
    key = f"{_arch(file)}.{key}"
    value = file.meta.get(key)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise file.error(f"{key} is {value!r}, expected a positive integer")
    return value


def _real(file, key, default=None):
    key = f"{_arch(file)}.{key}"
    value = file.meta.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise file.error(f"{key} is {value!r}, expected a finite number")
    return float(value)


def _n_layers(file):
    return _whole(file, "block_count")


def _linear_layers(file):
    """Blocks that have tensors of linear attention, from the names: cheap whatever count the metadata claims."""
    n_layers = _n_layers(file)
    found = (re.match(r"blk\.([0-9]{1,9})\.ssm_", name) for name in file.tensors)
    return sorted({int(match[1]) for match in found if match and int(match[1]) < n_layers})


def _config(file, il):
    arch = _arch(file)
    config = {"kind": "gdn", "n_embd": _whole(file, "embedding_length"), "width": _whole(file, "ssm.conv_kernel"),
              "head_map": HEAD_MAPS[arch], "norm_eps": _real(file, "attention.layer_norm_rms_epsilon"),
              "activation": "silu", "family": FAMILIES[arch]}
    if config["norm_eps"] < 0:
        raise file.error(f"{arch}.attention.layer_norm_rms_epsilon is {config['norm_eps']}, expected no less than 0")
    if arch == "kimi-linear":
        return LayerConfig(**config | _kda_config(file, il))
    H_k, H_v = _whole(file, "ssm.group_count"), _whole(file, "ssm.time_step_rank")
    inner = _whole(file, "ssm.inner_size")
    if H_v % H_k:
        raise file.error(f"{arch}.ssm.time_step_rank is {H_v}, no multiple of {arch}.ssm.group_count, {H_k}")
    if inner % H_v:
        raise file.error(f"{arch}.ssm.inner_size is {inner}, no multiple of {arch}.ssm.time_step_rank, {H_v}")
    return LayerConfig(**config, H_k=H_k, H_v=H_v, S_k=_whole(file, "ssm.state_size"), S_v=inner // H_v)


def _kda_config(file, il):
    H, S = _whole(file, "attention.head_count"), _whole(file, "kda.head_dim")
    bound = _real(file, "kda.gate_lower_bound", 0)
    if bound > 0:
        raise file.error(f"kimi-linear.kda.gate_lower_bound is {bound}, expected a negative number")
    ranks = {}
    for gate in "fg":
        down = file.tensors.get(f"blk.{il}.ssm_{gate}_a.weight")
        ranks[f"{gate}_rank"] = down.ne[1] if down and len(down.ne) > 1 and down.ne[1] else S
    return {"kind": "kda", "H_k": H, "H_v": H, "S_k": S, "S_v": S, "activation": "sigmoid",
            "gate": "bounded" if bound else "softplus", "lower_bound": bound or None, **ranks}


def _tensors(file, il, config):
    """Key to (tensor name, ne) of all that the layer needs, in whichever of its forms the file has; all checked."""
    E, H_v, width, S_v = config.n_embd, config.H_v, config.width, config.S_v
    C, inner = config.channels, H_v * S_v
    kda = config.kind == "kda"

    def has(name):
        return f"blk.{il}.{name}.weight" in file.tensors

    table = {"A": ("ssm_a", (H_v,)), "dt_bias": ("ssm_dt.bias", (H_v * config.S_k if kda else H_v,)),
             "norm": ("ssm_norm.weight", (S_v,)),
             "out": (("attn_output" if kda else "ssm_out") + ".weight", (inner, E))}
    if kda:
        table |= _kda_projections(il, config)
    else:
        fused = has("ssm_in") and not has("attn_qkv")
        table |= ({"qkvz": ("ssm_in.weight", (E, C + inner))} if fused else
                  {"qkv": ("attn_qkv.weight", (E, C)), "z": ("attn_gate.weight", (E, inner))})
        # Fused b and a are grouped per key head, which only interleaved heads are.
        fused = config.head_map == "interleaved" and not has("ssm_beta")
        table |= ({"ba": ("ssm_ba.weight", (E, 2 * H_v))} if fused else
                  {"b": ("ssm_beta.weight", (E, H_v)), "a": ("ssm_alpha.weight", (E, H_v))})
        table["conv"] = ("ssm_conv1d.weight", (width, C))
        if f"blk.{il}.ssm_conv1d.bias" in file.tensors:
            table["conv_bias"] = ("ssm_conv1d.bias", (C,))
    table = {key: (f"blk.{il}.{name}", ne) for key, (name, ne) in table.items()}
    for tensor in table.values():
        file.require(*tensor)
    _refuse_unused(file, il, {name for name, _ in table.values()})
    return table


def _refuse_unused(file, il, used):
    """A bias or a scale beside the layer's tensors that is read by nobody would make another model of it."""
    parts = {name.split(".")[2] for name in used}
    unused = sorted(name for name in file.tensors if name.startswith(f"blk.{il}.") and name not in used
                    and (name.split(".")[2] in parts or name.split(".")[2].startswith("ssm_")))
    if unused:
        raise file.error(f"{', '.join(unused)} of no known use in this layer")


def _kda_projections(il, config):
    """Separate q, k, v with a convolution each; the rank of the gates is whatever f_a and g_a have."""
    E, H, S, width = config.n_embd, config.H_v, config.S_v, config.width
    table, inner = {}, H * S
    for x in "qkv":
        table[x] = (f"attn_{x}.weight", (E, inner))
        table[f"conv_{x}"] = (f"ssm_conv1d_{x}.weight", (width, inner))
    table["b"] = ("ssm_beta.weight", (E, H))
    for gate, rank in (("f", config.f_rank), ("g", config.g_rank)):
        table[f"{gate}_a"] = (f"ssm_{gate}_a.weight", (E, rank))
        table[f"{gate}_b"] = (f"ssm_{gate}_b.weight", (rank, inner))
    return table
