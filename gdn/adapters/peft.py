"""LoRA adapters as the `peft` library saves them: a folder of adapter_config.json and adapter_model.safetensors.

Needs the `safetensors` package.

    adapter = from_peft("adapter")
    layer = gdn.GatedDeltaNet.from_gguf("model.gguf", 5, lora=adapter.get(5))
"""

import json
import re
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gdn.adapters.state_dict import NAMES

__all__ = ["Adapter", "from_peft"]

TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
MODULE = re.compile(r"(?:model\.|language_model\.|text_model\.)*layers\.(\d+)\.(?:linear_attn|self_attn|attention)\.(.+)")
SLOTS = {name: slot for slot, names in NAMES.items() for name in names}
TYPES = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "BF16": np.dtype("<u2")}
# Fields that change no output of what is saved: where it comes from, what was trained, how it began.
IGNORED = {"task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "target_modules",
          "exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size",
          "eva_config", "velora_config"}
READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
EXPECTED = {"peft_type": ("LORA",), "bias": ("none",),
            # Other ways to begin leave the base model's weights changed.
            "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica")}


class Adapter(dict[int, dict[str, list[tuple[NDArray[np.float32], NDArray[np.float32], float]]]]):
    """{block: {projection: [(A, B, scale)]}}: a layer's ``lora``, in the checkpoint's order of heads, by block.

    others    modules that the adapter changes elsewhere, which is their owner's to apply
    """

    def __init__(self) -> None:
        self.others: list[str] = []


def from_peft(folder: str | PathLike[str]) -> Adapter:
    """The `Adapter` in a folder that peft has saved.  Its scale is alpha / r, or alpha / sqrt(r) where rsLoRA says so.

    ValueError: a field of the configuration or a tensor means something else than A, B and a scale (DoRA, biases, saved
    modules, an init that changes the base model, ...), ranks that contradict the configuration, an A without its B;
    TypeError: tensors that are not float32, float16 or bfloat16; OSError: no such files.
    """
    config = json.loads(Path(folder, "adapter_config.json").read_text())
    _check_config(config)
    pairs = {}
    for name, x in _read_tensors(Path(folder, "adapter_model.safetensors")):
        match = TENSOR.fullmatch(name)
        if not match:
            raise ValueError(f"adapter: {name} is no A or B of a LoRA pair")
        half = pairs.setdefault(match[1], {})
        if match[2] in half:
            raise ValueError(f"adapter: {match[1]} has {match[2]} twice")
        half[match[2]] = x
    adapter = Adapter()
    for module, half in pairs.items():
        if len(half) < 2:
            raise ValueError(f"adapter: {module} has {', '.join(half)} alone, A and B go together")
        match = MODULE.fullmatch(module)
        if match and match[2] in SLOTS:
            lora = adapter.setdefault(int(match[1]), {}).setdefault(SLOTS[match[2]], [])
            lora.append((half["A"], half["B"], _scale(config, module, half["A"])))
        else:
            adapter.others.append(module)
    return adapter


def _check_config(config):
    for name, value in config.items():
        if name in EXPECTED and value not in EXPECTED[name] or value and name not in IGNORED | READ | set(EXPECTED):
            raise ValueError(f"adapter: {name} is {value!r}, which means more than A, B and a scale")
    missing = [name for name in ("peft_type", "r", "lora_alpha") if config.get(name) is None]
    if missing:
        raise ValueError(f"adapter: adapter_config.json lacks {', '.join(missing)}")


def _scale(config, module, A):
    """A pattern holds for modules whose path it ends, the first that fits."""
    rank, alpha = (next((value for key, value in (config.get(f"{name}_pattern") or {}).items()
                         if re.match(rf"(.*\.)?({key})$", module)), config[default])
                   for name, default in (("rank", "r"), ("alpha", "lora_alpha")))
    if A.ndim != 2 or len(A) != rank:
        raise ValueError(f"adapter: A of {module} has shape {A.shape}, the configuration says rank {rank}")
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _read_tensors(path):
    """(name, float32 array) of every tensor; the package's own reader gives numpy no bfloat16."""
    from safetensors import deserialize

    for name, x in deserialize(path.read_bytes()):
        if x["dtype"] not in TYPES:
            raise TypeError(f"adapter: {name} is {x['dtype']}, expected F32, F16 or BF16")
        values = np.frombuffer(x["data"], TYPES[x["dtype"]])
        if x["dtype"] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        yield name, values.astype(np.float32).reshape(x["shape"])
