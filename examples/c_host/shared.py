"""A ring of either form in POSIX shared memory, worked on by this Python process and by the C program `shared`.

    python shared.py build/shared

Python makes the ring and decodes, C continues the same sequence in place and adds another, Python continues both; what
is left is compared with `gdn.reference` on the tokens that were kept.
"""

import subprocess
import sys
from multiprocessing import shared_memory
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gdn
from gdn import reference

LAYERS, HEADS, S, WIDTH, ROLLBACK = 3, 2, 16, 4, 3
CHANNELS = 3 * HEADS * S
WEIGHT, GATE, BETA = 1 << 20, 1 << 21, 1 << 22
MASK = 2**64 - 1


def number(token: int, layer: int, i: int) -> np.float32:
    """model.h's made-up numbers."""
    x = token * 0x9E3779B97F4A7C15 + layer * 0xBF58476D1CE4E5B9 + i * 0x94D049BB133111EB + 1 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return np.float32((x >> 40) / (1 << 23) - 1.0)


def inputs(tokens: list[int], layer: int) -> tuple[NDArray[Any], ...]:
    """x (n, channels), g and beta (n, heads), weight (channels, width) of a layer."""
    x = np.array([[number(t, layer, c) for c in range(CHANNELS)] for t in tokens])
    g = np.array([[-0.05 - 0.5 * abs(number(t, layer, GATE + h)) for h in range(HEADS)] for t in tokens], np.float32)
    beta = np.array([[0.5 + 0.45 * number(t, layer, BETA + h) for h in range(HEADS)] for t in tokens], np.float32)
    weight = np.array([number(0, layer, WEIGHT + i) for i in range(CHANNELS * WIDTH)]).reshape(CHANNELS, WIDTH)
    return x, g, beta, weight


def decode(ring: gdn.StateRing, seq_id: int, tokens: list[int]) -> None:
    with ring.begin([seq_id], [len(tokens)]) as step:
        for layer in range(LAYERS):
            x, g, beta, weight = inputs(tokens, layer)
            lists: dict[str, Any] = {} if ring.form == "planes" else {
                "log": ring.log(layer), "log_in": step.log_in, "log_out": step.log_out, "checkpoints": step.checkpoints}
            y = gdn.causal_conv1d_inplace(x[None], weight, None, step.conv(layer), step.rows_in, step.rows_out, **lists)
            q, k, v = np.split(y.reshape(1, -1, 3 * HEADS, S), 3, axis=2)
            gdn.gated_delta_net_inplace(q, k, v, g[None], beta[None], step.ssm(layer), step.rows_in, step.rows_out,
                                        qk_l2norm=True, **lists)


def check(ring: gdn.StateRing, seq_id: int, tokens: list[int]) -> None:
    """The committed state against float64 on the kept tokens."""
    assert ring.position(seq_id) == len(tokens), (ring.position(seq_id), len(tokens))
    ring.copy(seq_id, 99, depth=False)          # the state alone, in a row of its own
    with ring.begin([99], [0]) as step:
        row = step.rows_in[0]
    ring.release(99)
    for layer in range(LAYERS):
        x, g, beta, weight = inputs(tokens, layer)
        line = np.concatenate([np.zeros((WIDTH - 1, CHANNELS)), x])
        y = sum(line[i:i + len(tokens)] * weight[:, i].astype(np.float64) for i in range(WIDTH))
        q, k, v = np.split((y * reference.sigmoid(y)).reshape(1, -1, 3 * HEADS, S), 3, axis=2)
        state = reference.recurrent(q, k, v, g[None], beta[None], qk_l2norm=True)[1][0]
        error = np.abs(ring.ssm(layer).numpy()[row] - state).max() / np.abs(state).max()
        assert error <= 1e-5, f"layer {layer} of sequence {seq_id} is off by {error:.1e}"
        assert (ring.conv(layer).numpy()[row, 0].T == line[-(WIDTH - 1):]).all()
    print(f"{ring.form}, sequence {seq_id}: {len(tokens)} tokens, as it should be")


def name_tokens(seq_id: int, start: int, n: int) -> list[int]:
    return [(seq_id << 32) + start + i + 1 for i in range(n)]


def run(program: str, form: str) -> None:
    options: dict[str, Any] = dict(n_layers=LAYERS, H_k=HEADS, H_v=HEADS, S_k=S, S_v=S, conv_channels=CHANNELS,
                                   conv_width=WIDTH, form=form)
    memory = shared_memory.SharedMemory(create=True, size=gdn.StateRing.nbytes_for(4, ROLLBACK, **options))
    try:
        ring = gdn.StateRing.create(4, ROLLBACK, buffer=memory.buf, **options)
        ring.acquire(1)
        kept = name_tokens(1, 0, 8)
        decode(ring, 1, kept)
        ring.rollback(1, 1)
        kept.pop()
        subprocess.run([program, "/" + memory.name.lstrip("/"), "1", "2"], check=True)
        kept += name_tokens(1, len(kept), 4)        # C decoded 6 and took 2 back
        check(ring, 1, kept)
        other = name_tokens(2, 0, 5)
        check(ring, 2, other)
        for seq_id, tokens in ((1, kept), (2, other)):
            ring.rollback(seq_id, 1)                # into what the other process wrote
            tokens.pop()
            tokens += name_tokens(seq_id, 100, 2)
            decode(ring, seq_id, tokens[-2:])
            check(ring, seq_id, tokens)
        del ring
    finally:
        memory.close()
        memory.unlink()


def main(program: str) -> None:
    for form in ("planes", "log"):
        run(program, form)
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
