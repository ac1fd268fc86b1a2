"""Linear-attention layers of GGUF files, as llama.cpp stores and runs them: the architectures of `ARCHS`.

Needs the `gguf` package.  Value heads are taken in the order of the file (tiled in all but qwen3next and KDA, which has
one value head a key head); projections that a file fuses per key head are taken apart.
"""

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from gdn import weight_layouts
from gdn.adapters._gguf_file import GGUFFile
from gdn.adapters.fields import MEANINGS, Fields, refuse_unread
from gdn.layer_config import LayerConfig


class _Arch(NamedTuple):
    """What llama.cpp's class of the architecture does that no key of the file says."""

    family: str
    kind: str = "gdn"
    activation: str = "silu"
    head_map: str = "interleaved"
    bound: str = ""               # of kda.gate_lower_bound: "" it is not read, "may" it makes the gate bounded, "must" be there
    l2_eps: float | None = None   # None: the norm's
    A_sign: int = 1               # ssm_a holds this times -exp(A_log)
    f: str = "low"                # "full": ssm_f_a is the whole projection
    g: str = "low"                # "full": ssm_g_a is;  "g": it is called ssm_g


_KDA: dict[str, Any] = {"kind": "kda", "activation": "sigmoid"}
ARCHS = {
    "qwen3next": _Arch("qwen3_next"),
    "qwen35": _Arch("qwen3_5", head_map="tiled"),
    "qwen35moe": _Arch("qwen3_5", head_map="tiled"),
    "qwen4exp": _Arch("qwen4_exp", head_map="tiled", activation="sigmoid"),
    "clef": _Arch("clef", head_map="tiled"),
    "kimi-linear": _Arch("kimi_linear", **_KDA),
    "glm5-next": _Arch("glm5_next", **_KDA, bound="may", l2_eps=1e-6),
    "bailingmoe3": _Arch("bailing_hybrid", **_KDA, bound="must", A_sign=-1, f="full", g="full"),
    "kimi-k3": _Arch("kimi_k3", **_KDA, bound="may", g="g"),
}
STATELESS = ("clef",)             # llama.cpp starts every batch of these from zero
READ_KEYS = {"gdn": ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size"),
             "kda": ("conv_kernel", "head_dim")}


def read_layer(path, il, overrides=None):
    """Weights and `gdn.LayerConfig` of block ``il``, as `GatedDeltaNet` and `KimiDeltaAttention` take them.

    ``path`` is a file, or the first part of a split one.  ``overrides`` is a mapping of the layer's config's fields that
    are to be other than llama.cpp's: {"gate": "bounded", "lower_bound": -5.0}.

    Weights are float32, rows are outputs; F32, F16, BF16 and every quantised type that the `gguf` package can
    dequantise are read.  ValueError for a file that is no GGUF file, is truncated or damaged, for a block that it
    lacks or that is no linear attention, for tensors missing, of no known use or of other shapes than the metadata says,
    for a decay's A of the wrong sign, and for keys that llama.cpp does not read where they would mean another function.
    """
    try:
        il = operator.index(il)
    except TypeError:
        raise TypeError(f"il must be an integer, got {il!r}") from None
    with GGUFFile(path) as file:
        n_layers = _whole(file, "block_count")
        if not 0 <= il < n_layers:
            raise file.error(f"il is {il}, the model has blocks 0 to {n_layers - 1}")
        if il not in _linear_layers(file):
            raise file.error(f"block {il} is no linear-attention layer; those are {_linear_layers(file)}")
        config, tensors = _layer(file, il, overrides)
        weights = {key: file.read(*tensor) for key, tensor in tensors.items() if key != "A"}
        weights["A"] = _decays(file, tensors["A"], config)
    names = {name.split(".")[2]: key for key, (name, _) in tensors.items() if key in (*PROJECTIONS, "out")}
    return weight_layouts.flat(weights, config), replace(config, projections=names)


def describe(path):
    """One dict for each linear-attention layer of the file, read from its header alone.

    The configuration as of `read_layer`, with ``il``, ``arch``, ``form`` (the projections' tensors), ``types`` (of all
    tensors), ``tensor_types`` (of each, by its name in the file), ``keeps_state`` and ``state_bytes``:
    float32 bytes of one sequence, ``conv_bytes`` and ``ssm_bytes`` together.  Errors as of `read_layer`.
    """
    with GGUFFile(path) as file:
        return [_describe(file, il) for il in _linear_layers(file)]


def inspect(path):
    """The text of `python -m gdn inspect`: a paragraph for each linear-attention layer, or why it cannot be run; then the
    other blocks.  Errors of the file as of `read_layer`."""
    with GGUFFile(path) as file:
        linear, layers, refused = _linear_layers(file), [], {}
        for il in linear:
            try:
                config, tensors = _layer(file, il, None)
                for tensor in tensors.values():
                    file.row_bytes(*tensor)
                _decays(file, tensors["A"], config)
                layers.append(_describe(file, il))
            except ValueError as error:
                refused[il] = str(error).removeprefix(f"{file.path}: ")
        arch, blocks = _arch(file), _blocks(file)
    if not linear:
        return f"{path}: {arch}, no linear-attention layers"
    total = sum(layer["state_bytes"] for layer in layers)
    lines = [f"{path}: {arch}, {len(linear)} linear-attention layers, {total:,} bytes of state a sequence"]
    for layer in layers:
        lines.append(PARAGRAPH.format(**layer | {
            "types": ", ".join(layer["types"]), "each": ", ".join(map(" ".join, layer["tensor_types"].items())),
            "bound": "" if layer["lower_bound"] is None else f", lower bound {layer['lower_bound']:g}",
            "ranks": ", ".join(f"{gate} {layer[f'{gate}_rank'] or 'full'}" for gate in "fg")}))
        if not layer["keeps_state"]:
            lines.append("    every batch starts from zero, no state is kept")
    lines += [f"layer {il}: cannot be run: {why}" for il, why in refused.items()]
    if len(blocks) > len(linear):
        other = ", ".join(str(il) for il in blocks if il not in linear)
        lines.append(f"layers {other}: cannot be run: no linear attention")
    return "\n".join(lines)


PARAGRAPH = """\
layer {il}: {kind}, {form} ({types})
    family {family}, gate {gate}{bound}, beta factor {beta_factor:g}, gate ranks {ranks}, output gate {activation}
    n_embd {n_embd}, H_k {H_k}, H_v {H_v}, S_k {S_k}, S_v {S_v}, width {width}, head map {head_map}
    {each}
    state {state_bytes:,} bytes a sequence: conv {conv_bytes:,}, ssm {ssm_bytes:,}"""
PROJECTIONS = ("qkvz", "q", "k", "v", "qkv", "z", "ba", "b", "a", "f_a", "f_b", "g_a", "g_b")


def _describe(file, il):
    from gguf.constants import GGMLQuantizationType

    names = {type.value: type.name for type in GGMLQuantizationType}
    config, tensors = _layer(file, il, None)
    types = {name.split(".", 2)[2].removesuffix(".weight"): names.get(file.require(name, ne).type, "unknown")
             for name, ne in tensors.values()}
    form = [name.split(".")[2] for key, (name, _) in tensors.items() if key in PROJECTIONS]
    arch = _arch(file)
    conv, ssm = 4 * config.channels * (config.width - 1), 4 * config.H_v * config.S_k * config.S_v
    return {"il": il, "arch": arch, "form": " + ".join(form), "types": sorted(set(types.values())), "tensor_types": types,
            **asdict(config), "keeps_state": arch not in STATELESS, "conv_bytes": conv, "ssm_bytes": ssm,
            "state_bytes": conv + ssm}


# ---- metadata --------------------------------------------------------------------------------------------------------

def _arch(file):
    arch = file.meta.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHS:
        raise file.error(f"general.architecture is {arch!r}, expected one of {', '.join(ARCHS)}")
    return arch


def _key(file, name):
    return f"{_arch(file)}.{name}"


def _whole(file, name):
    """A positive whole number of the metadata, small enough that products of a few stay exact; or a list of equal ones."""
    value = file.meta.get(_key(file, name))
    if isinstance(value, list) and value and name == "attention.head_count" and value == value[:1] * len(value):
        value = value[0]
    if type(value) is not int or not 0 < value < 1 << 31:
        raise file.error(f"{_key(file, name)} is {value!r}, expected a positive integer")
    return value


def _real(file, name):
    value = file.meta.get(_key(file, name))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise file.error(f"{_key(file, name)} is {value!r}, expected a finite number")
    return float(value)


def _blocks(file, part=""):
    """Blocks that have tensors whose names begin with ``part``: cheap whatever count the metadata claims."""
    n_layers = _whole(file, "block_count")
    found = (re.match(rf"blk\.([0-9]{{1,9}})\.{part}", name) for name in file.tensors)
    return sorted({int(match[1]) for match in found if match and int(match[1]) < n_layers})


def _linear_layers(file):
    return _blocks(file, "ssm_")


def _layer(file, il, overrides):
    """(LayerConfig, key to (tensor name, ne)) of a block, everything checked that the header says."""
    try:
        config = LayerConfig(**_fields(file, il, overrides)).override(overrides)
    except ValueError as error:
        raise file.error(error) from None
    _check_keys(file, il, config, overrides)
    return config, _tensors(file, il, config)


def _fields(file, il, overrides):
    """The fields of the block's LayerConfig as llama.cpp's class has them."""
    arch = ARCHS[_arch(file)]
    eps = _real(file, "attention.layer_norm_rms_epsilon")
    if eps < 0:
        raise file.error(f"{_key(file, 'attention.layer_norm_rms_epsilon')} is {eps}, expected no less than 0")
    fields = {"kind": arch.kind, "n_embd": _whole(file, "embedding_length"), "width": _whole(file, "ssm.conv_kernel"),
              "head_map": arch.head_map, "norm_eps": eps, "activation": arch.activation, "family": arch.family,
              "l2_eps": arch.l2_eps or float(str(np.float32(eps)))}              # the decimal that float32 stands for
    return fields | (_kda_fields(file, il, arch, overrides) if arch.kind == "kda" else _gdn_fields(file))


def _gdn_fields(file):
    H_k, H_v = _whole(file, "ssm.group_count"), _whole(file, "ssm.time_step_rank")
    inner = _whole(file, "ssm.inner_size")
    for name, value, by, divisor in (("time_step_rank", H_v, "group_count", H_k), ("inner_size", inner, "time_step_rank", H_v)):
        if value % divisor:
            raise file.error(f"{_key(file, 'ssm.' + name)} is {value}, no multiple of {_key(file, 'ssm.' + by)}, {divisor}")
    return {"H_k": H_k, "H_v": H_v, "S_k": _whole(file, "ssm.state_size"), "S_v": inner // H_v}


def _kda_fields(file, il, arch, overrides):
    H, S = _whole(file, "attention.head_count"), _whole(file, "kda.head_dim")
    fields = {"H_k": H, "H_v": H, "S_k": S, "S_v": S}
    for gate, form in (("f", arch.f), ("g", arch.g)):
        if form == "low":
            down = file.tensors.get(f"blk.{il}.ssm_{gate}_a.weight")
            fields[f"{gate}_rank"] = down.ne[1] if down and len(down.ne) > 1 and down.ne[1] else S
    is_there = _key(file, "kda.gate_lower_bound") in file.meta
    is_said = isinstance(overrides, Mapping) and "gate" in overrides
    if arch.bound and not is_said and (is_there or arch.bound == "must"):
        fields |= {"gate": "bounded", "lower_bound": _real(file, "kda.gate_lower_bound")}
    return fields


def _check_keys(file, il, config, overrides):
    """Refuses keys that llama.cpp does not read where they would mean another layer, and a block that it takes for attention."""
    for key, value in file.meta.items():
        group, _, name = key.rpartition(".")
        if key == _key(file, "kda.gate_lower_bound") and ARCHS[_arch(file)].bound or group.split(".")[0] != _arch(file):
            continue
        try:
            refuse_unread([Fields({name: value})], config, overrides)
        except ValueError as error:
            raise file.error(f"{group}.{str(error).removeprefix('config: ')}") from None
        is_known = name in READ_KEYS[config.kind] or any(pattern.search(name) for pattern, *_ in MEANINGS)
        if group in (_key(file, "kda"), _key(file, "ssm")) and not is_known:
            raise file.error(f"{key} is of no known meaning in a layer of {_arch(file)}")
    for name, is_linear in (("attention.head_count_kv", lambda n: n == 0), ("attention.recurrent_layers", bool)):
        value = file.meta.get(_key(file, name))
        if isinstance(value, list) and (config.kind == "kda") == (name == "attention.head_count_kv"):
            if il >= len(value) or not is_linear(value[il]):
                raise file.error(f"block {il} has tensors of linear attention, but {_key(file, name)} says that it has none")


# ---- tensors ---------------------------------------------------------------------------------------------------------

def _tensors(file, il, config):
    """Key to (tensor name, ne) of all that the layer needs, in whichever of its forms the file has; all checked."""
    kda = config.kind == "kda"
    names = {"A": "ssm_a", "dt_bias": "ssm_dt.bias", "norm": "ssm_norm.weight",
             "out": "attn_output.weight" if kda else "ssm_out.weight"}
    names |= {key: f"{name}.weight" for key, name in (_kda_names if kda else _gdn_names)(file, il, config).items()}
    if not kda and f"blk.{il}.ssm_conv1d.bias" in file.tensors:
        names["conv_bias"] = "ssm_conv1d.bias"
    shapes = weight_layouts.shapes(config)
    table = {key: (f"blk.{il}.{name}", shapes[key][::-1]) for key, name in names.items()}
    if config.family == "kimi_k3":
        table["A"] = _padded(file, *table["A"])
    for tensor in table.values():
        file.require(*tensor)
    _refuse_unused(file, il, {name for name, _ in table.values()})
    return table


def _has(file, il, name):
    return f"blk.{il}.{name}.weight" in file.tensors


def _gdn_names(file, il, config):
    fused = _has(file, il, "ssm_in") and not _has(file, il, "attn_qkv")
    names = {"qkvz": "ssm_in"} if fused else {"qkv": "attn_qkv", "z": "attn_gate"}
    # Fused b and a are grouped per key head, which only interleaved heads are.
    fused = config.head_map == "interleaved" and not _has(file, il, "ssm_beta")
    return names | ({"ba": "ssm_ba"} if fused else {"b": "ssm_beta", "a": "ssm_alpha"}) | {"conv": "ssm_conv1d"}


def _kda_names(file, il, config):
    arch = ARCHS[_arch(file)]
    names = {"qkv": "attn_qkv"} if _has(file, il, "attn_qkv") else {x: f"attn_{x}" for x in "qkv"}
    names |= {f"conv_{x}": f"ssm_conv1d_{x}" for x in "qkv"} | {"b": "ssm_beta"}
    names |= {"f_a": "ssm_f_a", "f_b": "ssm_f_b"} if arch.f == "low" else {"a": "ssm_f_a"}
    return names | ({"g_a": "ssm_g_a", "g_b": "ssm_g_b"} if arch.g == "low" else {"z": "ssm_g" if arch.g == "g" else "ssm_g_a"})


def _padded(file, name, ne):
    """ne of a decay's A that may go on beyond the heads."""
    info = file.tensors.get(name)
    more = math.prod(info.ne) if info else 0
    return (name, (more,)) if more > ne[0] else (name, ne)


def _decays(file, tensor, config):
    """A = -exp(A_log) of the heads, from what the file holds of it."""
    sign = ARCHS[_arch(file)].A_sign
    A = file.read(*tensor)[:config.H_v] * np.float32(sign)
    if not (A <= 0).all():
        meant = "-exp(A_log), none above" if sign > 0 else "exp(A_log), none below"
        raise file.error(f"tensor {tensor[0]} holds {sign * A[~(A <= 0)][0]:g}, expected {meant} 0")
    return A


def _refuse_unused(file, il, used):
    """A bias or a scale beside the layer's tensors that is read by nobody would make another model of it."""
    parts = {name.split(".")[2] for name in used}
    unused = sorted(name for name in file.tensors if name.startswith(f"blk.{il}.") and name not in used
                    and (name.split(".")[2] in parts or name.split(".")[2].startswith("ssm_")))
    if unused:
        raise file.error(f"{', '.join(unused)} of no known use in this layer")
