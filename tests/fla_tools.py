"""FLA's functions on random tensors, and what they should give, in float64."""

import numpy as np
import torch
import torch.nn.functional as F
from helpers import assert_close

import gdn
from gdn.adapters import fla

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
ROUNDING = {f32: 1e-5, f16: 2**-10, bf16: 2**-7}
FUNCTIONS = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"]


def inputs(B, T, H, HV, K, V, per_channel, dtype=f32, seed=0, normalizer=1.0, mask_p=0.0, n_states=None):
    torch.manual_seed(seed)
    g = F.logsigmoid(torch.randn((B, T, HV, K) if per_channel else (B, T, HV))) / normalizer
    q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1).to(dtype) for _ in range(2))
    return {"q": q, "k": k, "v": torch.randn(B, T, HV, V).to(dtype),
            "g": g * (torch.rand_like(g) >= mask_p), "beta": torch.rand(B, T, HV).to(dtype),
            "initial_state": torch.randn(n_states or B, HV, K, V)}


def numpy(x):
    return x.float().numpy()


def reference(q, k, v, g, beta, initial_state=None, scale=None, cu_seqlens=None, l2norm=False):
    """(out, final state [key][value]) in float64, sequence by sequence."""
    cuts = [(i, slice(None), slice(i, i + 1)) for i in range(len(q))] if cu_seqlens is None else [
        (0, slice(a, b), slice(n, n + 1)) for n, (a, b) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True))]
    outs, states = [], []
    for row, tokens, n in cuts:
        arrays = [numpy(x[row:row + 1, tokens]) for x in (q, k, v, g, beta)]
        state = None if initial_state is None else numpy(initial_state[n]).swapaxes(-1, -2)
        out, end = gdn.reference.recurrent(*arrays, state, scale=scale, head_map="interleaved", qk_l2norm=l2norm)
        outs.append(out)
        states.append(end.swapaxes(-1, -2))
    return np.concatenate(outs, 1 if cu_seqlens is not None else 0), np.concatenate(states)


def decay(raw, A_log, dt_bias, bound=None):
    """The log decay in float64 of a raw gate (..., heads) or (..., heads, channels); A_log None is an A of 1."""
    shape = raw.shape[2:]
    a = torch.ones(shape[0], dtype=torch.float64) if A_log is None else A_log.double().reshape(-1).exp()
    x = raw.double() + (0 if dt_bias is None else dt_bias.double().view(shape))
    a = a.view(-1, *[1] * (len(shape) - 1))
    return -a * F.softplus(x) if bound is None else bound * torch.sigmoid(a * x)


def compare(name, case, expected, dtype=f32, heads=slice(None), **options):
    """The function's results, or those of some of its value heads, are the expected ones."""
    out, final = getattr(fla, name)(**case, output_final_state=True, **options)
    assert out.dtype == case["q"].dtype and final.dtype == f32 and final.is_contiguous()
    assert_close(numpy(out[:, :, heads]), expected[0], name, 2 * ROUNDING[dtype])
    assert_close(numpy(final[:, heads]), expected[1], name, 2e-5)


def conv_reference(x, weight, bias, state, activation):
    """(out, last W inputs) in float64 of x (B, T, D) after state (B, D, W)."""
    W = weight.shape[1]
    full = torch.cat([torch.zeros(len(x), x.shape[2], W) if state is None else state.float(), x.transpose(1, 2).float()], -1)
    y = torch.einsum("bdtw,dw->bdt", full.double().unfold(2, W, 1), weight.double())[:, :, 1:]
    y = y if bias is None else y + bias.double()[:, None]
    return (F.silu(y) if activation else y).transpose(1, 2), full[:, :, -W:]
