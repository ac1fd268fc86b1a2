"""Calls of gdn, each built once and then timed: ``make(...)`` returns a callable without arguments, whose attribute
``check`` calls it once and compares what it wrote with the reference."""

import numpy as np

import gdn
from benchmarks.check import check_conv, check_result
from benchmarks.shapes import Shape, aligned, inputs

LAYERS = 24             # recurrent layers of the decode rows: 24 x 2 MiB of state, more than the last-level cache


def prefill(shape, n_tokens, n_threads=1, *, data=None, states=None, head_map="tiled", mode="auto"):
    """One call on a warm state; out and state_out given.  states: arrays for the state and the new one."""
    q, k, v, g, beta, state = data or inputs(shape, n_tokens)
    out, state_out = aligned(v.shape), aligned(state.shape)
    if states is not None:
        states[0][:] = state
        state, state_out = states

    def call():
        gdn.gated_delta_net(q, k, v, g, beta, state, head_map=head_map, mode=mode, out=out, state_out=state_out,
                            n_threads=n_threads)

    def check():
        before = state.copy()
        call()
        check_result(shape, (q, k, v, g, beta, before), out, state_out, head_map)
    call.check = check
    return call


def prefill_cold(shape, n_tokens, *, n_threads=1):
    """Every layer's call in turn, each on inputs and a state that the other layers pushed out of the cache."""
    layers = [prefill(shape, n_tokens, n_threads=n_threads, data=inputs(shape, n_tokens, seed=i))
              for i in range(LAYERS)]

    def call():
        for layer in layers:
            layer()
    call.check = layers[-1].check
    return call


def layer_states(shape, n_rows=1, n_layers=LAYERS, seed=1):
    """States of every layer in one block, (n_layers, n_rows, H_v, S_v, S_k)."""
    states = aligned((n_layers, n_rows, shape.H_v, shape.S_v, shape.S_k))
    np.random.default_rng(seed).standard_normal(out=states, dtype=np.float32)
    states *= 0.1
    return states


def decode(shape, states, n_tokens=1, n_snapshots=1, *, n_threads=1, head_map="tiled"):
    """n_tokens of one sequence through every layer, in place; slot s of the snapshots is row s of the layer."""
    q, k, v, g, beta, _ = inputs(shape, n_tokens)
    out = aligned(v.shape)
    rows_in = np.zeros(1, np.int64)
    rows_out = np.arange(n_snapshots, dtype=np.int64)[None]
    layers = list(states)

    def call():
        for layer in layers:
            gdn.gated_delta_net_inplace(q, k, v, g, beta, layer, rows_in, rows_out, head_map=head_map, out=out,
                                        n_threads=n_threads)

    def check():
        before = layers[-1][:1].copy()
        call()
        new = layers[-1][:1] if n_snapshots == 1 else layers[-1][:n_snapshots, None]
        check_result(shape, (q, k, v, g, beta, before), out, new, head_map, slots=n_snapshots)
    call.check = check
    return call


def decode_layers(shape, n_threads=1):
    """One token through LAYERS layers' states."""
    return decode(shape, layer_states(shape), n_threads=n_threads)


def decode_batch(shape, n_seqs, n_threads=1):
    """One token of n_seqs sequences through one layer, in place."""
    q, k, v, g, beta, cache = inputs(shape, 1, n_seqs)
    out, rows = aligned(v.shape), np.arange(n_seqs)

    def call():
        gdn.gated_delta_net_inplace(q, k, v, g, beta, cache, rows, head_map="interleaved", out=out, n_threads=n_threads)

    def check():
        before = cache.copy()
        call()
        check_result(shape, (q, k, v, g, beta, before), out, cache, "interleaved")
    call.check = check
    return call


def tiny():
    """The smallest call: what checks and planning cost."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 1, 16), dtype=np.float32) * 0.25 for _ in range(3))
    g, beta = np.full((1, 1, 1), -0.1, np.float32), np.full((1, 1, 1), 0.5, np.float32)
    state, out = np.zeros((1, 1, 16, 16), np.float32), np.empty_like(v)

    def call():
        gdn.gated_delta_net(q, k, v, g, beta, state, out=out, state_out=state)

    def check():
        before = state.copy()
        call()
        check_result(Shape("tiny", 1, 1, 16, 16), (q, k, v, g, beta, before), out, state)
    call.check = check
    return call


def conv(x, weight, state, *, n_threads=1):
    """Convolution and SiLU; out and state_out given."""
    out, state_out = aligned(x.shape), aligned(state.shape)

    def call():
        gdn.causal_conv1d(x, weight, None, state, out=out, state_out=state_out, n_threads=n_threads)

    def check():
        call()
        check_conv(x, weight, state, out, state_out)
    call.check = check
    return call
