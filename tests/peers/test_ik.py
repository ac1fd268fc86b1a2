"""gdn against ik_llama.cpp's delta_net: the same tensors through their own strides, nothing copied, nothing converted.

What differs is named: interleaved heads, beta as logits, states kept [key][value] and seen with swapped axes.
"""

import numpy as np
import pytest
from helpers import assert_close

import gdn
from gdn import reference
from tests.peers.compare import numbers, shared
from tests.peers.ik import delta_net_result


def tensors(ctx, n_seqs, n_tokens, H_k, H_v, S):
    """As ik's graph has them before the op: q and k by head, v, g and beta token by token; state [key][value]."""
    q, k, v, g, beta, state = numbers(S + n_tokens, n_seqs, n_tokens, H_k, H_v, S)
    q, k = (ctx.array(x.swapaxes(1, 2)) for x in (q, k))
    return q, k, ctx.array(v), ctx.array(g), ctx.array(np.log(beta / (1 - beta))), ctx.array(state.swapaxes(-1, -2))


def run(ctx, q, k, v, g, beta, state):
    """ik's op on them; (out, state) views of its result."""
    S, _, H_v, n_seqs = state.ne
    packed = ctx.op("delta_net", q, k, v.permute(0, 2, 1, 3), g.permute(1, 2, 0, 3), beta.permute(0, 2, 1, 3),
                    state.view((S, S * H_v, 1, n_seqs)))
    ctx.compute(packed)
    return delta_net_result(packed, S, H_v, q.ne[1], n_seqs)


def as_gdn(q, k, v, g, beta):
    return *(shared(x).permute(0, 2, 1, 3) for x in (q, k)), shared(v), shared(g), shared(beta)


OPTIONS = {"head_map": "interleaved", "beta_logit": True}


@pytest.mark.parametrize("S", [64, 128])
@pytest.mark.parametrize("n_tokens, H_k, H_v, n_seqs", [(1, 2, 4, 2), (5, 2, 6, 1), (16, 3, 3, 3), (70, 2, 4, 2)])
def test_delta_net(ik, S, n_tokens, H_k, H_v, n_seqs):
    ctx = ik.context()
    *inputs, state = tensors(ctx, n_seqs, n_tokens, H_k, H_v, S)
    out, new = run(ctx, *inputs, state)
    mine, my_state = ctx.new(*out.ne).set(np.nan), ctx.new(*new.ne).set(np.nan)
    gdn.gated_delta_net(*as_gdn(*inputs), shared(state).transpose(), **OPTIONS, out=shared(mine),
                        state_out=shared(my_state).transpose())
    assert_close(mine.numpy(), out.numpy(), "output")
    assert_close(my_state.numpy(), new.numpy(), "state")
    ref, ref_state = reference.recurrent(*map(np.asarray, as_gdn(*inputs)), state.numpy().swapaxes(-1, -2), **OPTIONS)
    assert_close(mine.numpy(), ref, "output against the reference")
    assert_close(my_state.numpy().swapaxes(-1, -2), ref_state, "state against the reference")


def test_cache_row_in_place(ik):
    """ik's cache has one row a slot: the convolution's state, then the recurrent one, [key][value].

    gdn updates the recurrent part of two rows in place, seen through the row's pitch and an offset.
    """
    S, H_k, H_v, n_slots, n_conv, n_tokens = 64, 2, 4, 4, 3 * 96, 6
    ctx = ik.context()
    *inputs, state = tensors(ctx, 2, n_tokens, H_k, H_v, S)
    row = n_conv + S * S * H_v
    cache = ctx.array(np.random.default_rng(0).standard_normal((n_slots, row)))
    rows = np.array([3, 1])
    cache.numpy()[0, 0, rows, n_conv:] = state.numpy().reshape(2, -1)
    before = cache.numpy().copy()
    out, new = run(ctx, *inputs, state)

    nb = 4, 4 * S, 4 * S * S, 4 * row
    states = gdn.Tensor(cache.address, (S, S, H_v, n_slots), nb, offset=4 * n_conv, owner=ctx)
    my_out = gdn.gated_delta_net_inplace(*as_gdn(*inputs), states.transpose(), rows, **OPTIONS)
    assert_close(my_out, out.numpy(), "output")
    after = cache.numpy()[0, 0]
    assert_close(after[rows, n_conv:], new.numpy().reshape(2, -1), "states")
    np.testing.assert_array_equal(after[:, :n_conv], before[0, 0, :, :n_conv])
    np.testing.assert_array_equal(after[[0, 2]], before[0, 0, [0, 2]])
