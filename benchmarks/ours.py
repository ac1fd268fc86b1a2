"""Calls of gdn, each built once and then timed: ``make(...)`` returns a callable without arguments, whose attribute
``check`` calls it once and compares what it wrote with the reference."""

import numpy as np

import gdn
from benchmarks.check import BOUND, check_conv, check_result
from benchmarks.shapes import Shape, aligned, inputs

LAYERS = 24             # recurrent layers of the decode rows: 24 x 2 MiB of state, more than the last-level cache


def prefill(shape, n_tokens, n_threads=1, *, data=None, states=None, head_map="tiled", mode="auto"):
    """One call on a warm state; out and state_out given.  states: arrays for the state and the new one."""
    q, k, v, g, beta, state = data or inputs(shape, n_tokens)
    out, state_out = aligned(v.shape, v.dtype), aligned(state.shape)
    if states is not None:
        states[0][:] = state
        state, state_out = states

    def call():
        gdn.gated_delta_net(q, k, v, g, beta, state, head_map=head_map, mode=mode, out=out, state_out=state_out,
                            n_threads=n_threads)

    def check():
        before = state.copy()
        call()
        check_result(shape, (q, k, v, g, beta, before), out, state_out, head_map, BOUND if out.dtype == np.float32 else 0.01)
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


def narrow_states(shape, dtype, n_rows=1):
    """`layer_states` of another type."""
    states = layer_states(shape, n_rows)
    narrow = aligned(states.shape, dtype)
    narrow[:] = states
    return narrow


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
        before = layers[-1][:1].astype(np.float32)
        call()
        new = layers[-1][:1] if n_snapshots == 1 else layers[-1][:n_snapshots, None]
        if new.dtype != np.float32:               # rounded: the output alone
            new = None
        check_result(shape, (q, k, v, g, beta, before), out, new, head_map, slots=n_snapshots)
    call.check = check
    return call


CAPACITY, KEPT = 16, 8  # of the token log's rows: entries a sequence may have, and those left behind a fold


def token_log(shape, n_entries, seed):
    """A log of unit keys and small updates."""
    rng = np.random.default_rng(seed)
    log = gdn.TokenLog(aligned((n_entries, shape.H_k, shape.S_k)), aligned((n_entries, shape.H_v, shape.S_v)),
                       aligned((n_entries, shape.H_v)))
    rng.standard_normal(out=log.k, dtype=np.float32)
    log.k[:] /= np.linalg.norm(log.k, axis=-1, keepdims=True)
    log.d[:] = 0.1 * rng.standard_normal(log.d.shape)
    log.g[:] = -0.05
    return log


def log_decode(shape, states, n_entries, n_tokens=1, *, parents=None, n_steps=1, n_threads=1):
    """n_steps steps of n_tokens of one sequence through every layer, on a state and a log.  Several steps are single tokens
    and fold: the log grows from KEPT entries, and what is beyond KEPT goes to the layer's other row when CAPACITY is
    passed; one step always starts alike, from n_entries."""
    data = inputs(shape, n_tokens)[:5]
    out, nowhere = aligned(data[2].shape), np.full(1, -1)
    size = 2 * CAPACITY + n_tokens
    layers = [(x, token_log(shape, size, i)) for i, x in enumerate(states)]
    steps, first, n, row = [], 0, n_entries, 0
    for _ in range(n_steps):
        fold = n + n_tokens > CAPACITY and n_steps > 1
        n_old = n + n_tokens - KEPT if fold else 0
        entries = (first + np.arange(n + n_tokens)) % size
        steps.append({"rows_in": np.array([row]), "log_in": entries[None, :n], "log_out": entries[None, n:],
                      "checkpoints": np.array([(0, n_old - n, 1 - row)]) if fold else None})
        if n_steps > 1:
            first, n, row = first + n_old, n + n_tokens - n_old, 1 - row if fold else row

    def call():
        for step in steps:
            for layer, log in layers:
                gdn.gated_delta_net_inplace(*data, layer, rows_out=nowhere, head_map="tiled", out=out, n_threads=n_threads,
                                            log=log, parents=parents, **step)

    def check():
        (layer, log), step = layers[-1], steps[-1]
        call()
        at = step["log_in"][0]
        state = gdn.reference.replay(layer[step["rows_in"][0]].astype(np.float32), log.k[at], log.d[at], log.g[at])[-1]
        for path in [range(n_tokens)] if parents is None else paths(parents[0]):
            check_result(shape, (*(x[:, path] for x in data), state[None]), out[:, path], None, "tiled")
    call.check = check
    return call


def paths(parents):
    """The tokens from the root to every one of a tree."""
    for t in range(len(parents)):
        path = [t]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        yield path


def decode_planes(shape, states, n_steps):
    """n_steps single tokens of one sequence through every layer, each to the next of the layer's rows."""
    q, k, v, g, beta, _ = inputs(shape, 1)
    out, n_rows = aligned(v.shape), states.shape[1]
    rows = [np.array([i]) for i in range(n_rows)]

    def call():
        for i in range(n_steps):
            for layer in states:
                gdn.gated_delta_net_inplace(q, k, v, g, beta, layer, rows[i % n_rows], rows[(i + 1) % n_rows], head_map="tiled",
                                            out=out, n_threads=1)
    return call


def prefill_checkpoints(shape, n_tokens, every):
    """A prompt in place, from zeros, with the state kept every so many tokens; 0 = at the end alone."""
    q, k, v, g, beta, _ = inputs(shape, n_tokens)
    out = aligned(v.shape)
    checkpoints = [(0, n, 1 + i) for i, n in enumerate(range(every, n_tokens, every))] if every else []
    cache = aligned((1 + n_tokens // (every or n_tokens), shape.H_v, shape.S_v, shape.S_k))

    def call():
        gdn.gated_delta_net_inplace(q, k, v, g, beta, cache, [-1], [0], head_map="tiled", out=out, n_threads=1,
                                    checkpoints=checkpoints or None)

    def check():
        call()
        zeros = np.zeros_like(cache[:1])
        check_result(shape, (q, k, v, g, beta, zeros), out, cache[:1], "tiled")
        for _, n, row in checkpoints[:2]:
            check_result(shape, (*(x[:, :n] for x in (q, k, v, g, beta)), zeros), out[:, :n], cache[row:row + 1], "tiled")
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
