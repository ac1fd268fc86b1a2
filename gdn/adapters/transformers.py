"""gdn inside transformers' models on the CPU.

    import gdn.adapters.transformers
    gdn.adapters.transformers.install()                     # every family of FAMILIES, or install(["qwen3_5"])

`install` replaces, in the model files themselves, the delta rule (chunked and recurrent) and the convolution (whole inputs
and cached steps), and in their classes the gated norm, KDA's forget gate and the entry of the layer, which checks packed
calls.  Models built before or after run the same: prefill, cached decoding, continuations of several tokens, padding as the
model masks it, beams; the cache's tensors stay where they are.  float32, float16 and bfloat16 are computed in float32 and
given back in their type.  Packed calls (cu_seq_lens_q or seq_idx; one row, no cache, or a ValueError before anything is
written) keep their sequences apart in the rule and the convolution both.

transformers' own function runs instead, and one log line says why, where a gradient is needed, on another device or type,
for a keyword or an activation it does not share with us; where that would let packed sequences run into each other,
ValueError.  `calls` counts what ran here: by family and function, or by op inside compiled graphs.

`register` is transformers' own way in, for `use_kernels=True`, through the `kernels` package.
"""

import contextlib
import functools
import importlib
import inspect
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from gdn.adapters import torch as base
from gdn.adapters.torch import calls

__all__ = ["FAMILIES", "calls", "install", "installed", "register", "uninstall"]

VERSIONS = ("5.24",)                    # of transformers, whose model files were read and are tested
GDN = {"chunk": "torch_chunk_gated_delta_rule", "recurrent": "torch_recurrent_gated_delta_rule"}
KDA = {"chunk": "chunk_kimi_delta_attention", "recurrent": "recurrent_kimi_delta_attention"}

# Family: the prefix of its classes, its functions' names, the layer's class.
FAMILIES = {
    "qwen3_next": ("Qwen3Next", GDN, "GatedDeltaNet"),
    "qwen3_5": ("Qwen3_5", GDN, "GatedDeltaNet"),
    "qwen3_5_moe": ("Qwen3_5Moe", GDN, "GatedDeltaNet"),
    "qwen4_exp": ("Qwen4ExpText", GDN, "GatedDeltaNet"),
    "lara_mini": ("LaraMini", GDN, "GatedDeltaNet"),
    "olmo_hybrid": ("OlmoHybrid", GDN, "GatedDeltaNet"),
    "kimi_linear": ("KimiLinear", KDA, "DeltaAttention"),
    "glm5_next": ("Glm5NextText", KDA, "LinearAttention"),
    "bailing_hybrid": ("BailingHybrid", KDA, "DeltaAttention"),
}

# The models' keywords that reach a layer and mean nothing to it, and those that are sequence boundaries.
MEANINGLESS = {"num_items_in_batch", "output_hidden_states", "output_attentions", "output_router_logits", "max_length_q",
               "max_length_k", "position_ids", "position_embeddings", "input_ids", "use_cache", "is_causal"}
BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")

Families: TypeAlias = str | Iterable[str] | None

_log = logging.getLogger(__name__)
_logged = set()
_running = threading.local()            # state: that of the cache of the layer that runs, which is about to copy its end into it
_replaced = {}                          # (owner, attribute): (what stood there, what stands there now)


def _reason(tensors, options):
    """Why the original has to run, or None."""
    unknown = sorted(set(options) - MEANINGLESS - set(BOUNDARIES))
    if unknown:
        return f"the keyword {unknown[0]} is not known"
    tensors = [x for x in tensors if x is not None]
    for x in tensors:
        if x.device.type != "cpu":
            return f"tensors are on {x.device.type}"
        if x.dtype not in base.TYPES:
            return f"tensors are {x.dtype}"
    return "a gradient is needed" if base.needs_gradient(*tensors) else None


def _original(name, reason, packed=False):
    """Say why the original runs, once for a family; ValueError where it would run packed sequences together."""
    if packed:
        raise ValueError(f"{name}: packed sequences cannot be kept apart, because {reason} and transformers' own function runs")
    key = name.partition(".")[0], reason
    if not torch.compiler.is_compiling() and key not in _logged:
        _logged.add(key)
        _log.warning("%s: transformers' own functions run, because %s", *key)


def _count(name):
    if not torch.compiler.is_compiling():
        calls[name] += 1


def _cuts(options, n_tokens):
    """cu_seqlens of a call's boundaries, which must agree, or None."""
    given = {name: options[name] for name in BOUNDARIES if options.get(name) is not None}
    cuts = {name: base.boundaries(x, n_tokens) if name == "seq_idx" else torch.from_numpy(base.integers(x, name))
            for name, x in given.items()}
    first, *others = cuts.items() if cuts else [(None, None)]
    for name, x in others:
        if not torch.equal(x.long(), first[1].long()):
            raise ValueError(f"{first[0]} and {name} do not cut at the same tokens")
    if first[0] == "cu_seq_lens_k":
        raise ValueError("cu_seq_lens_k is given without cu_seq_lens_q")
    return first[1]


def _rule(original, name, recurrent, q, k, v, g, beta, state, final, l2norm, options, **chunk):
    reason = _reason((q, k, v, g, beta, state), options)
    if reason:
        _original(name, reason, any(options.get(key) is not None for key in BOUNDARIES))
        return original(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=final,
                        use_qk_l2norm_in_kernel=l2norm, **chunk, **options)
    _count(name)
    arguments = q, k, v, g, beta, state, None, recurrent, _cuts(options, q.shape[1]), l2norm
    if final and state is not None and state is getattr(_running, "state", None) and state.dtype == torch.float32:
        return base.gated_delta_rule_update(*arguments), state
    out, state = base.run(base.gated_delta_rule, *arguments)
    return out, state if final else None


def _chunk(original, name):
    def chunk(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
              use_qk_l2norm_in_kernel=False, **kwargs):
        return _rule(original, name, False, query, key, value, g, beta, initial_state, output_final_state,
                     use_qk_l2norm_in_kernel, kwargs, chunk_size=chunk_size)
    return chunk


def _recurrent(original, name):
    def recurrent(query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
                  **kwargs):
        return _rule(original, name, True, query, key, value, g, beta, initial_state, output_final_state,
                     use_qk_l2norm_in_kernel, kwargs)
    return recurrent


def _activation_reason(activation):
    return None if activation in (None, *base.SILU) else f"the activation is {activation}"


def _conv(original, name):
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        reason = _reason((hidden_states, weight, bias), kwargs) or _activation_reason(activation)
        if reason:
            _original(name, reason, any(kwargs.get(key) is not None for key in BOUNDARIES))
            return original(hidden_states, weight, bias, activation, **kwargs)
        _count(name)
        cuts = _cuts(kwargs, hidden_states.shape[-1])
        return base.run(base.causal_conv1d, hidden_states.transpose(1, 2), weight, bias, None, activation, cuts).transpose(1, 2)
    return causal_conv1d_fn


def _conv_update(original, name):
    def causal_conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None):
        reason = _reason((hidden_states, conv_state, weight, bias), {}) or _activation_reason(activation)
        if reason:
            _original(name, reason)
            return original(hidden_states, conv_state, weight, bias, activation)
        _count(name)
        x = hidden_states.transpose(1, 2)
        return base.run(base.causal_conv1d_update, x, conv_state, weight, bias, activation).transpose(1, 2)
    return causal_conv1d_update


def _norm(original, name):
    def forward(self, hidden_states, gate=None):
        reason = _reason((hidden_states, gate, self.weight), {})
        if not reason and self.activation not in (*base.SILU, "sigmoid"):
            reason = f"the activation is {self.activation}"
        if reason or gate is None:
            _original(name, reason or "there is no gate")
            return original(self, hidden_states, gate)
        _count(name)
        return base.run(base.rms_norm_gated, hidden_states, gate, self.weight, self.variance_epsilon, self.activation)
    return forward


def _forget_gate(original, name):
    def forward(self, hidden_states):
        full_rank = hasattr(self, "f_proj")
        if full_rank:
            bound = self.lower_bound if self.safe_gate else None
        else:
            bound = getattr(self, "safe_gate_lower_bound", None)
        reason = _reason((hidden_states, self.A_log, self.dt_bias), {})
        if not reason and bound is not None and not bound < 0:
            reason = f"the gate's lower bound is {bound}"
        if reason:
            _original(name, reason)
            return original(self, hidden_states)
        _count(name)
        a = self.f_proj(hidden_states) if full_rank else self.f_b_proj(self.f_a_proj(hidden_states))
        a = a.view(*hidden_states.shape[:2], self.num_heads, self.head_dim)
        g = base.run(base.decay_gate, a, -self.A_log.reshape(-1).float().exp(), self.dt_bias, bound)
        return g.to(hidden_states.dtype) if full_rank else g
    return forward


def _layer(original, name):
    def forward(self, hidden_states, cache=None, attention_mask=None, **kwargs):
        if any(kwargs.get(key) is not None for key in BOUNDARIES):
            kwargs = _packed(name, hidden_states, kwargs.get("cache_params", cache), kwargs)
        if cache is None or torch.compiler.is_compiling():
            return original(self, hidden_states, cache, attention_mask, **kwargs)
        _running.state = cache.get_recurrent_state(self.layer_idx, state_idx=0)
        try:
            return original(self, hidden_states, cache, attention_mask, **kwargs)
        finally:
            _running.state = None
    return forward


def _packed(name, hidden_states, cache, kwargs):
    """The keywords of a packed call that can be done, else ValueError; boundaries of a single sequence are dropped."""
    n_seqs, n_tokens = hidden_states.shape[:2]
    if n_seqs != 1:
        raise ValueError(f"{name}: packed sequences must be one row, got {n_seqs}")
    cuts = _cuts(kwargs, n_tokens)
    if cuts.tolist() == [0, n_tokens]:
        return {key: x for key, x in kwargs.items() if key not in BOUNDARIES}
    if cache is not None:
        raise ValueError(f"{name}: packed sequences leave no state that a cache could hold: call the model with use_cache=False")
    return kwargs


def _targets(family):
    """(owner, attribute, name, maker of the replacement, parameters that the original must have) of all that is replaced."""
    prefix, rules, layer = FAMILIES[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    rule = ["query", "key", "value", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "kwargs"]
    yield module, rules["chunk"], _chunk, [*rule[:5], "chunk_size", *rule[5:]]
    yield module, rules["recurrent"], _recurrent, rule
    yield module, "causal_conv1d_fn", _conv, ["hidden_states", "weight", "bias", "activation", "kwargs"]
    yield module, "causal_conv1d_update", _conv_update, ["hidden_states", "conv_state", "weight", "bias", "activation"]
    yield getattr(module, prefix + "RMSNormGated"), "forward", _norm, ["self", "hidden_states", "gate"]
    if rules is KDA:
        yield getattr(module, prefix + "ForgetGate"), "forward", _forget_gate, ["self", "hidden_states"]
    yield getattr(module, prefix + layer), "forward", _layer, ["self", "hidden_states", "cache", "attention_mask", "kwargs"]


def _names(families):
    version = importlib.import_module("transformers").__version__
    if not version.startswith(tuple(v + "." for v in VERSIONS)):
        raise RuntimeError(f"transformers {version} is not known to gdn.adapters.transformers, which knows {', '.join(VERSIONS)}")
    if families is None:
        return list(FAMILIES)
    names = [name.removesuffix("_text") for name in ([families] if isinstance(families, str) else families)]
    for name in names:
        if name not in FAMILIES:
            raise ValueError(f"unknown family {name!r}: known are {', '.join(FAMILIES)}")
    return names


def _parameters(function):
    function = getattr(function, "forward", function) if isinstance(function, torch.nn.Module) else function
    return list(inspect.signature(function).parameters)


def install(families: Families = None) -> list[str]:
    """Replace what `families` run (default: all of FAMILIES); the names "family.function" of all that is replaced, sorted.

    What is replaced already stays as it is.  ValueError for an unknown family, RuntimeError for a version of transformers
    that is not in VERSIONS, both before anything is replaced.  A function whose parameters are not the ones known here is
    left alone, said by a log line, and not in the list.
    """
    result = []
    for family, owner, attribute, make, parameters in [(f, *t) for f in _names(families) for t in _targets(f)]:
        name = f"{family}.{attribute}" if inspect.ismodule(owner) else f"{family}.{owner.__name__}.{attribute}"
        original = getattr(owner, attribute)
        if _replaced.get((owner, attribute), (None, None))[1] is not original:
            if _parameters(original) != parameters:
                _log.warning("%s is left alone: its parameters are not those known here", name)
                continue
            replacement = functools.wraps(original)(make(original, name))
            _replaced[owner, attribute] = original, replacement
            setattr(owner, attribute, replacement)
        result.append(name)
    return sorted(result)


def uninstall(families: Families = None) -> None:
    """Put back what `install` replaced, unless something else has been put there since."""
    _logged.clear()
    for owner, attribute, *_ in [t for f in _names(families) for t in _targets(f)]:
        original, replacement = _replaced.pop((owner, attribute), (None, None))
        if original is not None and getattr(owner, attribute) is replacement:
            setattr(owner, attribute, original)


@contextlib.contextmanager
def installed(families: Families = None) -> Iterator[list[str]]:
    """`install` for a `with` block, whose value is install's list; a family that was installed before stays so."""
    families = _names(families)
    new = [f for f in families if not any((owner, attribute) in _replaced for owner, attribute, *_ in _targets(f))]
    try:
        yield install(families)
    finally:
        uninstall(new)


@dataclass(frozen=True)
class _Repository:
    """What the kernels package calls a repository: `load` gives the layer whose forward it puts into a model."""

    layer_name: str

    def load(self):
        return LAYERS[self.layer_name]

    def __str__(self):
        return f"gdn.adapters.transformers, layer `{self.layer_name}`"


def _kernel(name, make):
    """A layer without a state of its own; its forward has the parameters of the function that it stands in for."""
    def forward(self, *args, **kwargs):
        return make(functools.partial(type(self).forward, self), f"kernels.{name}")(*args, **kwargs)

    parameters = inspect.signature(make(None, name)).parameters.values()
    forward.__signature__ = inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters])
    return type(name, (torch.nn.Module,), {"forward": forward, "has_backward": False, "can_torch_compile": True})


LAYERS = {name: _kernel(name, make) for name, make in (
    ("chunk_gated_delta_rule", _chunk), ("fused_recurrent_gated_delta_rule", _recurrent), ("chunk_kda", _chunk),
    ("fused_recurrent_kda", _recurrent), ("causal_conv1d_fn", _conv), ("causal_conv1d_update", _conv_update))}


def register() -> list[str]:
    """Put "cpu" entries for LAYERS into the `kernels` package's mapping; their names are returned.

    `from_pretrained(..., use_kernels=True)` and `model.set_use_kernels(True)` then take them up.  transformers 5.24 asks for
    kernels >= 0.18.2.  What is kernelized is the model file's functions, so every model of that family in the process runs
    them, whichever was asked for; a KernelConfig cannot name them (it refuses "cpu").  The convolution and the rule are both
    taken up; the layer's check of packed calls, the gated norm and the forget gate are `install`'s alone, and a packed call
    with a cache is refused by the rule after the convolution's state was written.
    """
    from kernels import register_kernel_mapping

    register_kernel_mapping({name: {"cpu": _Repository(name)} for name in LAYERS})
    return sorted(LAYERS)
