"""gdn's operations on CPU tensors: what the adapters of transformers and FLA are made of, and torch.library ops.

float32, float16 and bfloat16 tensors go in and come out without a copy; what the kernels take in float32 alone (weights, A,
dt_bias) is converted.  Head maps are interleaved (key heads serve consecutive value heads) and states [key][value], as torch code
has them.  Inference only: no gradient is computed, and the callers decide what happens where one is needed.

The ops `gdn::gated_delta_rule`, `gdn::gated_delta_rule_update`, `gdn::causal_conv1d`, `gdn::causal_conv1d_update`,
`gdn::rms_norm_gated` and `gdn::decay_gate` are the functions below for torch.compile and torch.export;
`calls` counts how often each ran.
"""

import collections
import difflib
from typing import Any

import numpy as np
import torch

import gdn

TYPES = (torch.float32, torch.float16, torch.bfloat16)
SILU = ("silu", "swish")

calls: collections.Counter[str] = collections.Counter()


def __getattr__(name: str) -> Any:
    from gdn.adapters import fla

    if name in fla.__all__ and name != "as_module":
        return getattr(fla, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def unknown_keyword(function, name, known):
    """The TypeError for a keyword that a function does not have, with the nearest one that it has."""
    near = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def check(x: object, name: str) -> None:
    """TypeError unless x is a CPU tensor of one of TYPES."""
    if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
        raise TypeError(f"{name} must be a CPU tensor, got {x.device if isinstance(x, torch.Tensor) else type(x).__name__}")
    if x.dtype not in TYPES:
        kind = "floating-point numbers" if not x.is_floating_point() else "float32, float16 or bfloat16 numbers"
        raise TypeError(f"{name} must hold {kind}, got {x.dtype}")


def array(x, name):
    """x as a float32 array, its own memory where it is one; None is None."""
    if x is not None:
        check(x, name)
        return x.detach().to(torch.float32).numpy()


def typed(x, name):
    """x as gdn's functions take activations and states: its own memory; None is None."""
    if x is None:
        return None
    check(x, name)
    x = x.detach()
    return x if x.dtype == torch.bfloat16 else x.numpy()        # DLPack costs a step more than numpy, which has no bfloat16


def integers(x, name):
    """Sequence boundaries as an array; they may be a tensor on any device, an array or a list."""
    if x is None:
        return None
    x = x.detach().cpu() if isinstance(x, torch.Tensor) else torch.as_tensor(x)
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {x.dtype}")
    return x.numpy()


def boundaries(seq_idx: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """cu_seqlens of seq_idx (1, T) or (T,), which numbers the sequence that each token belongs to."""
    index = torch.from_numpy(integers(seq_idx, "seq_idx"))
    if index.numel() != n_tokens or index.ndim > 2 or (index.ndim == 2 and index.shape[0] != 1):
        raise ValueError(f"seq_idx must be (1, {n_tokens}), one row of packed sequences, got {tuple(index.shape)}")
    index = index.reshape(-1)
    cuts = (index[1:] != index[:-1]).nonzero().flatten() + 1
    if len(cuts) + 1 != len(index.unique()) and n_tokens:
        raise ValueError("seq_idx must number each sequence's tokens in one run")
    return torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), n_tokens)])


def _n_seqs(x, cu_seqlens):
    return x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1


def _transposed(state):
    """torch code's [key][value] as the [value][key] of gdn, a view."""
    return typed(state if state is None or state.ndim < 2 else state.transpose(-1, -2), "state")


def _empty(shape, dtype):
    """torch.empty in memory of numpy's, which asks for huge pages: a convolution spends more time on new small pages than on
    its numbers."""
    return torch.from_numpy(np.empty(shape, np.float32 if dtype == torch.float32 else np.float16)).view(dtype)


def _rule(q, k, v, g, beta, state, state_out, scale, recurrent, cu_seqlens, qk_l2norm):
    arrays = {name: typed(x, name) for name, x in zip(("q", "k", "v", "g", "beta"), (q, k, v, g, beta), strict=True)}
    out = _empty(v.shape, q.dtype)
    gdn.gated_delta_net(
        **arrays, state=_transposed(state), scale=scale, head_map="interleaved",
        mode="recurrent" if recurrent else "auto", cu_seqlens=integers(cu_seqlens, "cu_seqlens"),
        qk_l2norm=qk_l2norm, out=typed(out, "out"), state_out=_transposed(state_out))
    return out


def _shape(x, name, n):
    """TypeError or ValueError unless x is a tensor of n axes, before its extents are used."""
    check(x, name)
    if x.ndim != n:
        raise ValueError(f"{name} must have {n} axes, got the shape {tuple(x.shape)}")
    return x.shape


def gated_delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
                     state: torch.Tensor | None = None, scale: float | None = None, recurrent: bool = False,
                     cu_seqlens: torch.Tensor | None = None, qk_l2norm: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, final state) of the gated delta rule.

    q, k (B, T, H_k, S_k); v and out (B, T, H_v, S_v), out in q's type; beta (B, T, H_v); g (B, T, H_v), or per channel
    (B, T, H_v, S_k), log decay; state, None for zeros, and the final state, float32, (N, H_v, S_k, S_v).  With
    cu_seqlens (N + 1,), B is 1 and N sequences lie packed; else N is B.  recurrent goes token by token; scale and qk_l2norm
    as `gdn.gated_delta_net` has them.  float32, float16 or bfloat16; TypeError for other tensors, ValueError for shapes that
    do not fit.
    """
    calls["gdn::gated_delta_rule"] += 1
    (*_, S_k), (*_, H_v, S_v) = _shape(q, "q", 4), _shape(v, "v", 4)
    final = torch.empty((_n_seqs(q, cu_seqlens), H_v, S_k, S_v), dtype=torch.float32)
    return _rule(q, k, v, g, beta, state, final, scale, recurrent, cu_seqlens, qk_l2norm), final


def gated_delta_rule_update(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
                            state: torch.Tensor, scale: float | None = None, recurrent: bool = False,
                            cu_seqlens: torch.Tensor | None = None, qk_l2norm: bool = False) -> torch.Tensor:
    """`gated_delta_rule` on a float32 state that is updated in place."""
    calls["gdn::gated_delta_rule_update"] += 1
    check(state, "state")
    if state.dtype != torch.float32:
        raise TypeError(f"state must hold float32 numbers to be updated in place, got {state.dtype}")
    return _rule(q, k, v, g, beta, state, state, scale, recurrent, cu_seqlens, qk_l2norm)


def _convolve(x, weight, bias, state, activation, cu_seqlens):
    channels, width = _shape(weight, "weight", 2)
    _shape(x, "x", 3)
    if state is not None:
        n, c, columns = _shape(state, "state", 3)
        if c != channels or columns < width - 1:
            raise ValueError(f"state must be (N, {channels}, at least {width - 1}), got {tuple(state.shape)}")
        state = state[:, :, columns - (width - 1):].contiguous()        # a narrow one is slow to read in steps
    out = _empty(x.shape, x.dtype)
    gdn.causal_conv1d(typed(x, "x"), array(weight, "weight"), array(bias, "bias"), typed(state, "state"),
                      activation="silu" if activation in SILU else activation,
                      cu_seqlens=integers(cu_seqlens, "cu_seqlens"), out=typed(out, "out"))
    return out


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, state: torch.Tensor | None = None,
                  activation: str | None = None, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """The depthwise causal convolution of x (B, T, C) with weight (C, W), in x's type.

    bias (C,); state (N, C, at least W - 1), the inputs before x, newest last, None for zeros; activation "silu", "swish"
    or None; cu_seqlens as in `gated_delta_rule`.  The state is not written: see `windows`.
    """
    calls["gdn::causal_conv1d"] += 1
    return _convolve(x, weight, bias, state, activation, cu_seqlens)


def causal_conv1d_update(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
                         activation: str | None = None) -> torch.Tensor:
    """`causal_conv1d` of x (B, T, C) on a state (B, C, columns) that is moved on in place: its last columns are x's."""
    calls["gdn::causal_conv1d_update"] += 1
    out = _convolve(x, weight, bias, state, activation, None)
    state.detach().copy_(windows(x, state, state.shape[-1]))
    return out


def windows(x: torch.Tensor, state: torch.Tensor | None, columns: int,
            cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """The last `columns` inputs of every sequence, (N, C, columns) in x's type: those of x (B, T, C) behind the state's."""
    x = x.detach().transpose(1, 2)
    if cu_seqlens is None:
        parts = [x]
    else:
        parts = [x[:, :, a:b] for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)]
        state = [None] * len(parts) if state is None else state.split(1)
    states = [state] if cu_seqlens is None else state
    return torch.cat([_window(part, before, columns) for part, before in zip(parts, states, strict=True)])


def _window(x, before, columns):
    missing = columns - x.shape[-1]
    if missing <= 0:
        return x[:, :, x.shape[-1] - columns:]
    if before is None:
        return torch.nn.functional.pad(x, (missing, 0))
    before = before.detach()[:, :, max(before.shape[-1] - missing, 0):].to(x.dtype)
    joined = torch.cat([before, x], -1)
    return joined if joined.shape[-1] == columns else torch.nn.functional.pad(joined, (columns - joined.shape[-1], 0))


def rms_norm_gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6,
                   activation: str = "silu") -> torch.Tensor:
    """rms_norm(x) * weight * activation(gate) over the last axis, in x's type; activation "silu", "swish" or "sigmoid"."""
    calls["gdn::rms_norm_gated"] += 1
    out = _empty(x.shape, x.dtype)
    gdn.rms_norm_gated(typed(x, "x"), typed(gate, "gate"), array(weight, "weight"), eps,
                       activation="silu" if activation in SILU else activation, out=typed(out, "out"))
    return out


def decay_gate(a: torch.Tensor, A: torch.Tensor, dt_bias: torch.Tensor | None = None,
               lower_bound: float | None = None) -> torch.Tensor:
    """`gdn.decay_gate` in float32, "bounded" with a lower_bound, else "softplus".

    a (B, T, H) or (B, T, H, S_k); A (H,) the negative of exp(A_log); dt_bias (H,) or (H * S_k,), None for zeros.
    """
    calls["gdn::decay_gate"] += 1
    if dt_bias is None:
        dt_bias = torch.zeros(a.shape[-2] * a.shape[-1] if a.ndim == 4 else a.shape[-1])
    out = _empty(a.shape, torch.float32)
    gdn.decay_gate(typed(a, "a"), array(A, "A"), array(dt_bias, "dt_bias"), out=out.numpy(),
                   gate="softplus" if lower_bound is None else "bounded", lower_bound=lower_bound)
    return out


def _op(function, fake, mutates_args=()):
    """function, and as `gdn::` op what compiled graphs call; eager code calls the function itself, which costs less."""
    op = torch.library.custom_op(f"gdn::{function.__name__}", function, mutates_args=mutates_args, device_types="cpu")
    op.register_fake(fake)
    return op


def _fake_rule(q, k, v, g, beta, state=None, scale=None, recurrent=False, cu_seqlens=None, qk_l2norm=False):
    n = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = q.new_empty((n, v.shape[2], q.shape[3], v.shape[3]), dtype=torch.float32)
    return q.new_empty(v.shape), final


def _fake_update(q, k, v, g, beta, state, scale=None, recurrent=False, cu_seqlens=None, qk_l2norm=False):
    return q.new_empty(v.shape)


def _fake_like(x, *others, **options):
    return x.new_empty(x.shape)


OPS = {f.__name__: _op(f, fake, mutates) for f, fake, mutates in (
    (gated_delta_rule, _fake_rule, ()),
    (gated_delta_rule_update, _fake_update, ("state",)),
    (causal_conv1d, _fake_like, ()),
    (causal_conv1d_update, _fake_like, ("state",)),
    (rms_norm_gated, _fake_like, ()),
    (decay_gate, lambda a, A, dt_bias=None, lower_bound=None: a.new_empty(a.shape, dtype=torch.float32), ()))}


def run(function, *arguments):
    """function(*arguments), by its op while torch compiles or exports."""
    return (OPS[function.__name__] if torch.compiler.is_compiling() else function)(*arguments)
