"""The functions of FLA (flash-linear-attention) for gated delta rules and short convolutions, on CPU tensors.

    from gdn.adapters.fla import chunk_gated_delta_rule     # in place of fla.ops.gated_delta_rule's
    gdn.adapters.fla.as_module()                            # or: `from fla.ops...` itself works where FLA is not installed

Names, order and meaning of the parameters are those of FLA 0.6.  Shapes: q, k (B, T, H_k, S_k); v (B, T, H_v, S_v), H_v a
multiple of H_k, key heads serving consecutive value heads; beta (B, T, H_v); g (B, T, H_v), or one for each key channel,
(B, T, H_v, S_k), as the KDA functions have it; states (N, H_v, S_k, S_v), final ones float32; with cu_seqlens (N + 1,) B is 1
and N sequences lie packed.  float32, float16 or bfloat16, out in q's type.  `query`, `key` and `value` are other names of q,
k and v.  Done inside: scale, the L2 norm of q and k, the gate of A_log, dt_bias and lower_bound, beta's sigmoid and its
doubling (allow_neg_eigval), gk and gv, state_v_first (of old, transpose_state_layout).  Hints that change no result are
taken and have no effect: chunk_size, chunk_indices, cu_seqlens_cpu, disable_recompute, backend, safe_gate and lower_bound
without an in-kernel gate.

ValueError for shapes and values that do not fit, TypeError for other tensors and for an argument that means something which
is not done here (named, as is the nearest keyword for an unknown one), RuntimeError where a gradient would be lost.  All
before anything is computed; no argument is written.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TypeAlias

import torch

from gdn.adapters import torch as base

__all__ = ["as_module", "causal_conv1d", "causal_conv1d_update", "chunk_gated_delta_rule", "chunk_kda",
           "fused_recurrent_gated_delta_rule", "fused_recurrent_kda"]


Tensor: TypeAlias = torch.Tensor | None
Boundaries: TypeAlias = torch.Tensor | Sequence[int] | None


def chunk_gated_delta_rule(q: Tensor = None, k: Tensor = None, v: Tensor = None, g: Tensor = None, beta: Tensor = None,
                           scale: float | None = None, initial_state: Tensor = None, output_final_state: bool = False,
                           use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
                           allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Boundaries = None,
                           cu_seqlens_cpu: Boundaries = None, chunk_indices: Boundaries = None, cp_context: object = None, *,
                           use_gate_in_kernel: bool = False, A_log: Tensor = None, dt_bias: Tensor = None, chunk_size: int = 64,
                           head_first: bool | None = None, transpose_state_layout: bool | None = None, query: Tensor = None,
                           key: Tensor = None, value: Tensor = None, **unknown: object) -> tuple[torch.Tensor, Tensor]:
    """(out, final state or None) of the gated delta rule with one decay per head; see the module."""
    return _rule("chunk_gated_delta_rule", False, False, locals())


def fused_recurrent_gated_delta_rule(q: Tensor = None, k: Tensor = None, v: Tensor = None, g: Tensor = None, gk: Tensor = None,
                                     gv: Tensor = None, beta: Tensor = None, scale: float | None = None,
                                     initial_state: Tensor = None, output_final_state: bool = False,
                                     use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
                                     A_log: Tensor = None, dt_bias: Tensor = None, use_beta_sigmoid_in_kernel: bool = False,
                                     allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Boundaries = None,
                                     *, head_first: bool | None = None, transpose_state_layout: bool | None = None,
                                     query: Tensor = None, key: Tensor = None, value: Tensor = None,
                                     **unknown: object) -> tuple[torch.Tensor, Tensor]:
    """`chunk_gated_delta_rule` token by token; g None is no decay, beta None is 1.

    gk (B, T, H_v, S_k) and gv (B, T, H_v, S_v), log decays of key and value channels, are added to g.
    """
    return _rule("fused_recurrent_gated_delta_rule", True, False, locals())


def chunk_kda(q: Tensor = None, k: Tensor = None, v: Tensor = None, g: Tensor = None, beta: Tensor = None,
              scale: float | None = None, initial_state: Tensor = None, output_final_state: bool = False,
              use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
              allow_neg_eigval: bool = False, safe_gate: bool = False, lower_bound: float | None = None,
              disable_recompute: bool = False, return_intermediate_states: bool = False, state_v_first: bool = False,
              cu_seqlens: Boundaries = None, cu_seqlens_cpu: Boundaries = None, cp_context: object = None,
              use_graph: bool = False, max_num_seqs: int | None = None, *, A_log: Tensor = None, dt_bias: Tensor = None,
              chunk_indices: Boundaries = None, chunk_size: int = 64, head_first: bool | None = None,
              transpose_state_layout: bool | None = None, query: Tensor = None, key: Tensor = None, value: Tensor = None,
              **unknown: object) -> tuple[torch.Tensor, Tensor]:
    """(out, final state or None) of Kimi Delta Attention, one decay per key channel; see the module."""
    return _rule("chunk_kda", False, True, locals())


def fused_recurrent_kda(q: Tensor = None, k: Tensor = None, v: Tensor = None, g: Tensor = None, beta: Tensor = None,
                        A_log: Tensor = None, dt_bias: Tensor = None, scale: float | None = None, initial_state: Tensor = None,
                        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
                        use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
                        allow_neg_eigval: bool = False, lower_bound: float | None = None, state_v_first: bool = False,
                        cu_seqlens: Boundaries = None, *, safe_gate: bool = False, head_first: bool | None = None,
                        transpose_state_layout: bool | None = None, query: Tensor = None, key: Tensor = None,
                        value: Tensor = None, **unknown: object) -> tuple[torch.Tensor, Tensor]:
    """`chunk_kda` token by token; g None is no decay, beta None is 1."""
    return _rule("fused_recurrent_kda", True, True, locals())


# Arguments that mean something which is not done here, unless they are off.
REFUSED = ("cp_context", "head_first", "max_num_seqs", "return_intermediate_states", "use_graph")


def _refuse(function, arguments):
    """TypeError for an unknown keyword, for one of REFUSED, and for q, k and v under none of their names or two."""
    known = [name for name in arguments if name != "unknown"]
    for name in arguments["unknown"]:
        raise base.unknown_keyword(function, name, known)
    for name in REFUSED:
        if arguments.get(name) is not None and arguments[name] is not False:
            raise TypeError(f"{function}() does not do {name}={arguments[name]!r}")
    for short, name in (("q", "query"), ("k", "key"), ("v", "value")):
        given = [x for x in (arguments.get(short), arguments.get(name)) if x is not None]
        if len(given) != 1:
            raise TypeError(f"{function}() takes {short} once, under that name or as {name}, got it {len(given)} times")
        arguments[short] = given[0]
    if base.needs_gradient(*(x for x in arguments.values() if isinstance(x, torch.Tensor))):
        names = [name for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.requires_grad]
        raise RuntimeError(f"{names[0]} requires a gradient, which this function does not compute: use torch.no_grad()")


def _rule(function, recurrent, per_channel, a):
    _refuse(function, a)
    _check_hints(a)
    v = a["v"]
    for name in ("q", "k", "v", "initial_state"):
        if a[name] is not None:
            base.check(a[name], name)
            if a[name].ndim != 4:
                raise ValueError(f"{name} must have 4 axes, got the shape {tuple(a[name].shape)}")
    state_v_first = _state_v_first(function, a)
    state = a["initial_state"]
    if state is not None and state_v_first:
        state = state.transpose(-1, -2)
    g, beta = _gate(function, recurrent, per_channel, a), _beta(function, recurrent, a)
    by_column = a.get("gv") is not None
    if by_column:
        v, g, beta, state = _columns(v, g, a["gv"], beta, state)
    out, final = base.run(
        base.gated_delta_rule, a["q"], a["k"], v, g, beta, state, None if a["scale"] is None else float(a["scale"]), recurrent,
        a["cu_seqlens"], bool(a["use_qk_l2norm_in_kernel"]))
    if by_column:
        out, final = out.view(a["v"].shape), final.view(-1, *a["v"].shape[2:], final.shape[2]).transpose(-1, -2)
    if not a["output_final_state"]:
        return out, None
    return out, (final.transpose(-1, -2) if state_v_first else final).contiguous()


def _columns(v, g, gv, beta, state):
    """The same with a head for every value column, whose decay is its own; key heads serve consecutive ones as before."""
    base.check(gv, "gv")
    if gv.shape != v.shape:
        raise ValueError(f"gv must have the shape {tuple(v.shape)}, got {tuple(gv.shape)}")
    g = (g.unsqueeze(3) + (gv if g.ndim == 3 else gv.unsqueeze(4))).flatten(2, 3)
    state = None if state is None else state.transpose(-1, -2).flatten(1, 2).unsqueeze(3)
    return v.flatten(2).unsqueeze(3), g, beta.repeat_interleave(v.shape[3], 2), state


def _state_v_first(function, a):
    old, new = a["transpose_state_layout"], a["state_v_first"]
    if old is not None and new:
        raise TypeError(f"{function}() takes state_v_first or, of old, transpose_state_layout, not both")
    return bool(new if old is None else old)


def _check_hints(a):
    if not (isinstance(a.get("chunk_size", 64), int) and a.get("chunk_size", 64) > 0):
        raise ValueError(f"chunk_size must be a positive integer, got {a['chunk_size']!r}")
    on_cpu = a.get("cu_seqlens_cpu")
    if on_cpu is not None and (a["cu_seqlens"] is None or base.integers(on_cpu, "cu_seqlens_cpu").tolist()
                               != base.integers(a["cu_seqlens"], "cu_seqlens").tolist()):
        raise ValueError("cu_seqlens_cpu must be a copy of cu_seqlens")
    if a.get("chunk_indices") is not None and a["cu_seqlens"] is None:
        raise ValueError("chunk_indices are given but cu_seqlens is not")


def _gate(function, recurrent, per_channel, a):
    """The log decay: g itself, or what A_log, dt_bias and lower_bound make of it; gk added."""
    g, gk = _gate_of_g(function, recurrent, per_channel, a), a.get("gk")
    if gk is None:
        return g
    base.check(gk, "gk")
    channels = *a["v"].shape[:3], a["q"].shape[3]
    if gk.shape != channels:
        raise ValueError(f"gk must have the shape {channels}, got {tuple(gk.shape)}")
    return gk if a["g"] is None else gk + (g if g.ndim == 4 else g.unsqueeze(3))


def _gate_of_g(function, recurrent, per_channel, a):
    q, v, g = a["q"], a["v"], a["g"]
    scalar, channels = v.shape[:3], (*v.shape[:3], q.shape[3])
    shape = channels if per_channel else scalar
    if g is None:
        if recurrent and not a["use_gate_in_kernel"]:
            return torch.zeros(shape)
        raise TypeError(f"{function}() is missing g")
    base.check(g, "g")
    if g.shape != shape and (a["use_gate_in_kernel"] or g.shape not in (scalar, channels)):
        raise ValueError(f"g must have the shape {tuple(shape)}, got {tuple(g.shape)}")
    A_log, dt_bias, bound = a["A_log"], a["dt_bias"], a.get("lower_bound")
    if not a["use_gate_in_kernel"]:
        for name in ("A_log", "dt_bias"):
            if a[name] is not None:
                raise TypeError(f"{function}() takes {name} with use_gate_in_kernel=True alone")
        return g
    if a.get("safe_gate") and bound is None:
        raise ValueError("lower_bound must be given with safe_gate=True and use_gate_in_kernel=True")
    if bound is not None and not float(bound) < 0:
        raise ValueError(f"lower_bound must be below 0, got {bound}")
    if A_log is None and bound is None:
        raise ValueError("A_log must be given with use_gate_in_kernel=True")
    heads = shape[2]
    if A_log is not None:
        base.check(A_log, "A_log")
        if A_log.numel() != heads:
            raise ValueError(f"A_log must hold {heads} numbers, one a value head, got {A_log.numel()}")
    A = -torch.ones(heads) if A_log is None else -A_log.detach().reshape(heads).float().exp()
    if dt_bias is not None:
        base.check(dt_bias, "dt_bias")
        dt_bias = dt_bias.reshape(-1)
    return base.run(base.decay_gate, g, A, dt_bias, None if bound is None else float(bound))


def _beta(function, recurrent, a):
    beta, logit = a["beta"], a["use_beta_sigmoid_in_kernel"]
    if a["allow_neg_eigval"] and not logit:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True: beta is doubled with its sigmoid")
    if beta is None:
        if recurrent and not logit:
            return torch.ones(a["v"].shape[:3])
        raise TypeError(f"{function}() is missing beta")
    base.check(beta, "beta")
    return beta.float().sigmoid() * (2 if a["allow_neg_eigval"] else 1) if logit else beta


def causal_conv1d(x: torch.Tensor, weight: Tensor = None, bias: Tensor = None, residual: Tensor = None,
                  initial_state: Tensor = None, output_final_state: bool = False, activation: str | None = None,
                  backend: str | None = "triton", cu_seqlens: Boundaries = None, cu_seqlens_cpu: Boundaries = None,
                  chunk_indices: Boundaries = None, cp_context: object = None, *, seq_idx: Boundaries = None,
                  **unknown: object) -> tuple[torch.Tensor, Tensor]:
    """(out, final state or None) of the depthwise causal convolution, both in x's type.

    x, residual and out (B, T, D), or with D split over more axes; weight (D, W); bias (D,); activation "silu", "swish" or
    None; residual is added last.  initial_state and the final state (N, D, W): a sequence's last W inputs, newest last.
    With cu_seqlens (N + 1,), or seq_idx (1, T) that numbers the sequence of each token, B is 1.  backend names one of FLA's
    and has no effect.
    """
    a = {**locals(), "q": x, "k": x, "v": x}
    _refuse("causal_conv1d", a)
    _check_hints(a)
    if backend not in ("triton", "cuda", "mix", None):
        raise ValueError(f"backend must be 'triton', 'cuda' or 'mix', got {backend!r}")
    if activation not in (None, *base.SILU):
        raise ValueError(f"activation must be 'silu', 'swish' or None, got {activation!r}")
    for name in ("x", "weight", "residual"):
        if a[name] is not None or name != "residual":
            base.check(a[name], name)
    if weight.ndim != 2 or x.ndim < 3 or x.shape[2:].numel() != weight.shape[0]:
        raise ValueError(f"x must be (B, T, D) and weight (D, W), got {tuple(x.shape)} and {tuple(weight.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x {tuple(x.shape)}, got {tuple(residual.shape)}")
    if initial_state is not None and initial_state.shape[-1] != weight.shape[1]:
        raise ValueError(f"initial_state must be (N, D, {weight.shape[1]}), got {tuple(initial_state.shape)}")
    if seq_idx is not None:
        cuts = base.boundaries(seq_idx, x.shape[1])
        if cu_seqlens is not None and base.integers(cu_seqlens, "cu_seqlens").tolist() != cuts.tolist():
            raise ValueError("cu_seqlens and seq_idx do not cut at the same tokens")
        cu_seqlens = cuts
    flat = x.flatten(2)
    out = base.run(base.causal_conv1d, flat, weight, bias, initial_state, activation, cu_seqlens).view(x.shape)
    if residual is not None:
        out = out + residual.to(out.dtype)
    return out, base.windows(flat, initial_state, weight.shape[1], cu_seqlens) if output_final_state else None


def causal_conv1d_update(x: torch.Tensor, cache: torch.Tensor, residual: Tensor = None, weight: Tensor = None,
                         bias: Tensor = None, activation: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, cache): `causal_conv1d` of one token a sequence on a cache (N, D, W) that is moved on in place.

    x and residual (N, D), (N, 1, D) or (1, N, D).
    """
    base.check(x, "x")
    base.check(cache, "cache")
    if cache.ndim != 3 or x.numel() != cache.shape[0] * cache.shape[1]:
        raise ValueError(f"x must hold one token for each sequence of cache {tuple(cache.shape)}, got {tuple(x.shape)}")
    tokens = x.reshape(cache.shape[0], 1, cache.shape[1])
    out, moved = causal_conv1d(tokens, weight, bias, None if residual is None else residual.reshape(tokens.shape), cache, True,
                               activation)
    cache.copy_(moved)
    return out.reshape(x.shape), cache


MODULES = {
    "fla.ops.gated_delta_rule": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "fla.ops.kda": ("chunk_kda", "fused_recurrent_kda"),
    "fla.ops": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"),
    "fla.modules": (),
    "fla.modules.conv": ("causal_conv1d", "causal_conv1d_update"),
    "fla.modules.convolution": ("causal_conv1d", "causal_conv1d_update"),
    "fla.modules.causal_conv1d": ("causal_conv1d", "causal_conv1d_update"),
    "fla": (),
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for MODULES; last on sys.meta_path, so that an installed FLA is found before."""

    def find_spec(self, name, path=None, target=None):
        if name not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=__name__, is_package=name.count(".") < 2)

    def exec_module(self, module):
        vars(module).update({name: globals()[name] for name in MODULES[module.__name__]})
        module.__getattr__ = lambda name: _absent(module.__name__, name)


def _absent(module, name):
    raise AttributeError(f"{module} stands in for FLA, which is not installed, and has no {name}: gdn.adapters.fla has "
                         + ", ".join(x for x in __all__ if x != "as_module"))


def as_module() -> ModuleType:
    """Make `from fla.ops... import` find the functions above where FLA is not installed; the module `fla` is returned.

    For the rest of the process.  An installed FLA is found first and returned.  Call it before importing the code that
    imports FLA; transformers' model files look for FLA when they are imported and would take these functions, which
    refuse gradients: use `gdn.adapters.transformers` there.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    return importlib.import_module("fla")
