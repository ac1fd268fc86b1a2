"""The delta rule under the signatures that transformers and FLA call, on CPU tensors.

    import transformers.models.qwen3_next.modeling_qwen3_next as m
    from gdn.adapters import torch as gdn_torch
    m.torch_chunk_gated_delta_rule = gdn_torch.chunk_gated_delta_rule
    m.torch_recurrent_gated_delta_rule = gdn_torch.fused_recurrent_gated_delta_rule

Inference only: tensors that require a gradient are refused while gradients are recorded.
"""

import torch

from gdn import _core

__all__ = ["chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda"]


# Options of FLA that change the meaning of an argument.
REFUSED = ("head_first", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate", "lower_bound", "A_log",
           "dt_bias", "transpose_state_layout", "state_v_first", "gk", "gv", "allow_neg_eigval", "reverse",
           "ssm_state_indices", "num_accepted_tokens")


def chunk_gated_delta_rule(q, k, v, g, beta, *, chunk_size=64, mode="chunked", scale=None, initial_state=None,
                           output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, **others):
    """(out, final state or None) of the gated delta rule, float32 inside, out in q's type.

    q, k (B, T, H_k, S_k); v (B, T, H_v, S_v); beta (B, T, H_v); g (B, T, H_v), or (B, T, H_v, S_k) per channel, log
    decay; key heads serve consecutive value heads.  initial_state and the final state (N, H_v, S_k, S_v) float32; with
    cu_seqlens (N + 1,), B is 1 and the sequences lie packed.  chunk_size is the caller's wish, the kernel has its own;
    others are the models' keywords that mean nothing here, but those in REFUSED are a ValueError unless false.
    ValueError for shapes that do not fit, TypeError for anything but CPU tensors of floating-point numbers,
    RuntimeError where a gradient would be lost.
    """
    for name in REFUSED:
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(f"{name} is not supported")
    arrays = {name: _array(x, name) for name, x in zip("qkv", (q, k, v), strict=True)}
    arrays |= {"g": _array(g, "g"), "beta": _array(beta, "beta")}
    state = None if initial_state is None else _array(initial_state, "initial_state").swapaxes(-1, -2)
    out, final = _core.gated_delta_net(
        **arrays, state=state, scale=scale, head_map="interleaved", mode=mode,
        cu_seqlens=None if cu_seqlens is None else _integers(cu_seqlens), qk_l2norm=use_qk_l2norm_in_kernel)
    final = torch.from_numpy(final.swapaxes(-1, -2)).contiguous() if output_final_state else None
    return torch.from_numpy(out).to(q.dtype), final


def fused_recurrent_gated_delta_rule(q, k, v, g, beta, **options):
    """`chunk_gated_delta_rule`, token by token."""
    return chunk_gated_delta_rule(q, k, v, g, beta, **{**options, "mode": "recurrent"})


chunk_kda = chunk_gated_delta_rule                          # the gate's shape tells the two apart
fused_recurrent_kda = fused_recurrent_gated_delta_rule


def _array(x, name):
    if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
        raise TypeError(f"{name} must be a CPU tensor, got {x.device if isinstance(x, torch.Tensor) else type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must hold floating-point numbers, got {x.dtype}")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name} requires a gradient, which this function does not compute: use torch.no_grad()")
    return x.detach().to(torch.float32).numpy()


def _integers(x):
    return x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x
