"""gdn against ggml's own operations, on ggml's own memory: inputs and results are tensors in a ggml arena."""

import numpy as np
import pytest
from helpers import assert_close

import gdn
from gdn import reference
from tests.peers.compare import numbers, shared
from tests.peers.ggml import I32, delta_net_result


def delta_inputs(ctx, layout, n_seqs, n_tokens, H_k, H_v, S, kda):
    """The six tensors; q, k and v contiguous, cut from one fused projection, or stored by head and permuted."""
    q, k, v, *rest = numbers(n_tokens, n_seqs, n_tokens, H_k, H_v, S, kda)
    if layout == "fused":
        width = (2 * H_k + H_v) * S
        fused = ctx.new(width, n_tokens, n_seqs)
        nb = [4 * S, 4 * width, 4 * width * n_tokens]
        views = [fused.view((S, heads, n_tokens, n_seqs), nb, 4 * S * first)
                 for heads, first in ((H_k, 0), (H_k, H_k), (H_v, 2 * H_k))]
        for view, x in zip(views, (q, k, v), strict=True):
            view.set(x)
    elif layout == "by head":
        views = [ctx.array(x.swapaxes(1, 2)).permute(0, 2, 1, 3) for x in (q, k, v)]
    else:
        views = [ctx.array(x) for x in (q, k, v)]
    return [*views, *(ctx.array(x) for x in rest)]


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("layout", ["contiguous", "fused", "by head"])
@pytest.mark.parametrize("n_tokens, K, S, H_k, H_v, n_seqs", [
    (1, 1, 128, 2, 4, 1), (3, 4, 16, 1, 3, 2), (7, 3, 64, 2, 2, 3), (65, 1, 128, 2, 4, 2), (70, 5, 20, 2, 6, 1)])
def test_gated_delta_net(ggml, n_tokens, K, S, H_k, H_v, n_seqs, layout, kda):
    ctx = ggml.context()
    tensors = delta_inputs(ctx, layout, n_seqs, n_tokens, H_k, H_v, S, kda)
    packed = ctx.op("gated_delta_net", *tensors, K)
    out, snapshots = delta_net_result(packed, S, H_v, n_tokens, n_seqs, K)
    ctx.compute(packed)

    mine = ctx.new(*packed.ne).set(np.nan)              # ggml's memory too, laid out as its op's result
    my_out, my_snapshots = delta_net_result(mine, S, H_v, n_tokens, n_seqs, K)
    q, k, v, g, beta, state = map(shared, tensors)
    gdn.gated_delta_net(q, k, v, g, beta, state, head_map="tiled", snapshots=K, out=shared(my_out),
                        state_out=shared(my_snapshots))

    kept = min(K, n_tokens) * n_seqs
    assert_close(my_out.numpy(), out.numpy(), "output")
    assert_close(my_snapshots.numpy()[:kept], snapshots.numpy()[:kept], "snapshots")
    assert np.isnan(my_snapshots.numpy()[kept:]).all(), "slots older than the sequence were written"
    states = []
    ref, _ = reference.recurrent(*(t.numpy() for t in tensors), head_map="tiled", states=states)
    assert_close(my_out.numpy(), ref, "output against the reference")
    assert_close(out.numpy(), ref, "ggml's output against the reference")
    assert_close(my_snapshots.numpy()[:kept], np.concatenate(states[:-K - 1:-1]), "snapshots against the reference")


@pytest.mark.parametrize("n, m, n_batch", [(1, 1, 1), (16, 3, 2), (33, 64, 3), (64, 128, 2)])
def test_solve_tri(ggml, n, m, n_batch):
    rng = np.random.default_rng(n)
    ctx = ggml.context()
    a = ctx.array(np.tril(rng.standard_normal((n_batch, n, n))) / n + 2 * np.eye(n))
    b = ctx.array(rng.standard_normal((n_batch, n, m)))
    x, mine = ctx.op("solve_tri", a, b, True, True, False), ctx.new(m, n, n_batch).set(np.nan)
    ctx.compute(x)
    gdn.solve_tri(shared(a), shared(b), out=shared(mine))
    assert_close(mine.numpy(), x.numpy(), "solution")
    assert_close(mine.numpy()[0], np.linalg.solve(a.numpy()[0].astype(float), b.numpy()[0]), "solution against float64")


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("n_tokens, channels, n_seqs", [(1, 8, 1), (2, 33, 2), (9, 64, 3), (40, 260, 1)])
def test_convolution(ggml, n_tokens, channels, n_seqs, width):
    """concat, ssm_conv and silu, on an input seen transposed, against one call."""
    rng = np.random.default_rng(n_tokens)
    ctx = ggml.context()
    x = ctx.array(rng.standard_normal((n_seqs, n_tokens, channels)))
    state, weight = (ctx.array(rng.standard_normal(s)) for s in ((n_seqs, channels, width - 1), (channels, width)))
    joined = ctx.op("concat", state, x.permute(1, 0, 2, 3), 0)
    out = ctx.op("silu", ctx.op("ssm_conv", joined, weight))
    ctx.compute(out)
    mine, my_state = ctx.new(*out.ne).set(np.nan), ctx.new(*state.ne).set(np.nan)
    gdn.causal_conv1d(shared(x), shared(weight), None, shared(state), out=shared(mine), state_out=shared(my_state))
    assert_close(mine.numpy(), out.numpy(), "convolution")
    np.testing.assert_array_equal(my_state.numpy(), joined.numpy()[..., n_tokens:])


@pytest.mark.parametrize("n", [1, 33, 128, 132, 260])
def test_norms(ggml, n):
    rng = np.random.default_rng(n)
    ctx = ggml.context()
    rows = rng.standard_normal((2, 5, 3, n)) * np.array([1e-4, 1, 1e3])[:, None]
    rows[0, 0, 1] = 0
    x, z = (ctx.array(a).permute(0, 2, 1, 3) for a in (rows, rng.standard_normal(rows.shape)))
    weight = ctx.array(rng.standard_normal(n))
    norm = ctx.op("l2_norm", x, 1e-6)
    gated = ctx.op("mul", ctx.op("mul", ctx.op("rms_norm", x, 1e-5), weight), ctx.op("silu", ctx.op("cont", z)))
    ctx.compute(norm, gated)
    mine = ctx.new(*norm.ne).set(np.nan)
    gdn.l2_norm(shared(x), 1e-6, form="max", out=shared(mine))
    assert_close(mine.numpy(), norm.numpy(), "l2_norm")
    mine.set(np.nan)
    gdn.rms_norm_gated(shared(x), shared(z), shared(weight), 1e-5, out=shared(mine))
    assert_close(mine.numpy(), gated.numpy(), "rms_norm_gated")


def test_decay_gate(ggml):
    """softplus(a + dt_bias) * A as qwen3next's graph builds it from the tensors in a GGUF file."""
    rng = np.random.default_rng(0)
    ctx = ggml.context()
    a = ctx.array(rng.standard_normal((2, 9, 6, 1)) * 8)
    bias, A = (ctx.array(x.reshape(6, 1)) for x in (rng.standard_normal(6), -np.exp(rng.uniform(-2, 2, 6))))
    gate = ctx.op("mul", ctx.op("softplus", ctx.op("add", a, bias)), A)
    ctx.compute(gate)
    mine = ctx.new(*gate.ne).set(np.nan)
    gdn.decay_gate(shared(a), A.numpy().reshape(6), bias.numpy().reshape(6), out=shared(mine))
    assert_close(mine.numpy(), gate.numpy(), "decay gate")


def test_cumsum_is_the_chunks_decay(ggml):
    """The decay of tokens 1..i of a chunk, a running product here, is exp of ggml_cumsum of the gates."""
    ctx = ggml.context()
    q, k, v, g, beta, state = numbers(5, 1, 24, 2, 2, 8)
    sums = ctx.op("cumsum", ctx.array(g[0, :, :, 0].T))
    ctx.compute(sums)
    chunks = []
    reference.chunked(q, k, v, g, beta, state, chunk=24, trace=chunks)
    assert_close(np.exp(sums.numpy()[0, 0]), chunks[0]["e"][0, :, :, 0], "decays")


# ---- the cache that llama.cpp keeps ----------------------------------------------------------------------------------

def test_rollback_groups_in_place(ggml):
    """ggml owns the cache [n_embd_s, n_slots * K]; group i of a sequence, newest first, is row i * mem_size + head + s.

    ggml: gather the rows, run the op with K snapshots, copy every group back.  gdn: one call on the same cache.
    Sequences 0 and 1 start from each other's rows, 2 is a fork of the row that 0 starts from, nothing else may change.
    """
    S, H_k, H_v, mem_size, K, head, n_seqs, n_tokens = 16, 2, 4, 5, 3, 1, 3, 4
    n_embd_s = S * S * H_v
    ctx = ggml.context()
    before = np.random.default_rng(0).standard_normal((mem_size * K, n_embd_s)).astype(np.float32)
    theirs, mine = ctx.array(before), ctx.array(before)
    rows_in = np.array([head + 1, head, head + 1])
    *inputs, _ = (ctx.array(x) for x in numbers(1, n_seqs, n_tokens, H_k, H_v, S))

    gathered = ctx.op("get_rows", theirs, ctx.array(rows_in, type=I32)).view((S, S, H_v, n_seqs))
    packed = ctx.op("gated_delta_net", *inputs, gathered, K)
    out, snapshots = delta_net_result(packed, S, H_v, n_tokens, n_seqs, K)
    row, group = 4 * n_embd_s, 4 * n_embd_s * n_seqs
    copies = [ctx.op("cpy", snapshots.view((n_embd_s * n_seqs,), offset=i * group),
                     theirs.view((n_embd_s * n_seqs,), offset=(i * mem_size + head) * row)) for i in range(K)]
    ctx.compute(*copies)

    cache = shared(mine.view((S, S, H_v, mem_size * K)))
    rows_out = np.arange(K)[None] * mem_size + head + np.arange(n_seqs)[:, None]
    my_out = gdn.gated_delta_net_inplace(*map(shared, inputs), cache, rows_in, rows_out, head_map="tiled")
    assert_close(my_out, out.numpy(), "output")
    after = mine.numpy()[0, 0]
    assert_close(after, theirs.numpy()[0, 0], "cache")
    untouched = np.setdiff1d(np.arange(mem_size * K), rows_out)
    assert untouched.size and np.array_equal(after[untouched], before[untouched])
    assert not np.isclose(after[rows_out.ravel()], before[rows_out.ravel()]).all(1).any()


@pytest.mark.parametrize("n_tokens", [5, 2])
def test_convolution_groups_in_place(ggml, n_tokens):
    """The convolution cache [n_embd_r, n_slots * K]: group i holds the width-1 inputs up to i tokens before the end.

    Where a sequence is shorter than K, ggml's graph clamps and copies; gdn leaves the older groups as they were.
    """
    channels, width, mem_size, K, head, n_seqs = 12, 4, 4, 3, 1, 2
    n_embd_r = (width - 1) * channels
    rng = np.random.default_rng(2)
    ctx = ggml.context()
    before = rng.standard_normal((mem_size * K, n_embd_r)).astype(np.float32)
    theirs, mine = ctx.array(before), ctx.array(before)
    x, weight = (ctx.array(rng.standard_normal(s)) for s in ((n_seqs, n_tokens, channels), (channels, width)))
    rows_in = np.array([head + 1, head])

    past = ctx.op("get_rows", theirs, ctx.array(rows_in, type=I32)).view((width - 1, channels, n_seqs))
    joined = ctx.op("concat", past, x.permute(1, 0, 2, 3), 0)
    out = ctx.op("silu", ctx.op("ssm_conv", joined, weight))
    copies = [out]
    for i in range(min(K, n_tokens)):
        tail = joined.view((width - 1, channels, n_seqs), joined.nb[1:], 4 * (n_tokens - i))
        target = theirs.view((width - 1, channels, n_seqs), offset=(i * mem_size + head) * 4 * n_embd_r)
        copies.append(ctx.op("cpy", tail, target))
    ctx.compute(*copies)

    rows_out = np.arange(K)[None] * mem_size + head + np.arange(n_seqs)[:, None]
    cache = shared(mine.view((width - 1, channels, mem_size * K)))
    my_out = gdn.causal_conv1d_inplace(shared(x), shared(weight), None, cache, rows_in, rows_out)
    assert_close(my_out, out.numpy()[0], "convolution")
    np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
