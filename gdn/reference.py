"""Float64 numpy truth for the gated delta rule: the recurrence, its chunked form and token logs, no tricks.

Arrays are in numpy order: q, k (n_seqs, n_tokens, H_k, S_k); v (n_seqs, n_tokens, H_v, S_v);
g (n_seqs, n_tokens, H_v) for the scalar gate or (n_seqs, n_tokens, H_v, S_k) per key channel;
beta (n_seqs, n_tokens, H_v); state (n_seqs, H_v, S_v, S_k).  Anything numpy can read is accepted and
computed in float64; nothing is validated beyond what the arithmetic needs.  This module imports numpy
alone, so that it can be read, copied and trusted on its own.

Sources: arXiv 2412.06464 (Gated DeltaNet), arXiv 2510.26692 (Kimi Delta Attention).
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

__all__ = ["chunked", "head_index", "l2_norm", "recurrent", "replay", "sigmoid", "softplus"]


def sigmoid(x: Any) -> Floats:
    """1 / (1 + exp(-x)) in float64, without overflow."""
    x = np.asarray(x, np.float64)
    e = np.exp(-np.abs(x))
    y: Floats = np.where(x >= 0, 1 / (1 + e), e / (1 + e))
    return y


def softplus(x: Any) -> Floats:
    """log(1 + exp(x)) in float64, accurate for very negative and very large x."""
    x = np.asarray(x, np.float64)
    y: Floats = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return y


def l2_norm(x: Any, eps: float = 1e-6, form: str = "sum") -> Floats:
    """x / sqrt(sum x^2 + eps) ("sum") or x / max(||x||, eps) ("max") along the last axis."""
    x = np.asarray(x, np.float64)
    squares = (x * x).sum(-1, keepdims=True)
    y: Floats = x / (np.sqrt(squares + eps) if form == "sum" else np.maximum(np.sqrt(squares), eps))
    return y


def head_index(H_k: int, H_v: int, head_map: str) -> NDArray[np.int64]:
    """Key head of every value head: h % H_k ("tiled") or h // (H_v // H_k) ("interleaved")."""
    h = np.arange(H_v)
    return h % H_k if head_map == "tiled" else h // (H_v // H_k)


def _prepare(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, scale: float | None, head_map: str, qk_l2norm: bool,
             l2_eps: float, l2_form: str, beta_logit: bool) -> tuple[Any, ...]:
    """Everything in float64, one row per value head: q, k, g have a key-channel axis, state is [key][value]."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    S_k, (n_seqs, _, H_v, S_v) = q.shape[-1], v.shape
    if qk_l2norm:
        q, k = l2_norm(q, l2_eps, l2_form), l2_norm(k, l2_eps, l2_form)
    heads = head_index(q.shape[2], H_v, head_map)
    q, k = q[:, :, heads], k[:, :, heads]
    if g.ndim == 3:
        g = g[..., None]
    beta = beta.reshape(v.shape[:3])
    if beta_logit:
        beta = sigmoid(beta)
    S = np.zeros((n_seqs, H_v, S_k, S_v)) if state is None else np.array(np.swapaxes(state, -1, -2), np.float64)
    return q, k, v, g, beta, S, S_k**-0.5 if scale is None else float(scale)


def recurrent(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None, *,
              scale: float | None = None, head_map: str = "tiled", qk_l2norm: bool = False, l2_eps: float = 1e-6,
              l2_form: str = "sum", beta_logit: bool = False, states: list[Any] | None = None,
              deltas: list[Any] | None = None, parents: Any = None) -> tuple[Floats, Floats]:
    """The recurrence, token by token.  Returns (out, state) in float64.

    ``states``: a list that receives a copy of the state (n_seqs, H_v, S_v, S_k) after every token; ``deltas``: one that
    receives d (n_seqs, H_v, S_v) of every token, which with k and g is its entry in a token log.
    ``parents`` (n_seqs, n_tokens): the token that each one continues, -1 = the initial state; None: the one before it.
    The state returned is that of the last token.
    """
    q, k, v, g, beta, S, scale = _prepare(q, k, v, g, beta, state, scale, head_map, qk_l2norm, l2_eps, l2_form,
                                          beta_logit)
    out, after = np.zeros(v.shape), [S]                   # after[t + 1]: the states after token t, where a tree needs them
    for t in range(v.shape[1]):
        if parents is not None:
            S = np.stack([after[p + 1][i] for i, p in enumerate(np.asarray(parents)[:, t])])
        S = np.exp(g[:, t])[..., None] * S                                   # decay first
        d = beta[:, t][..., None] * (v[:, t] - np.einsum("nhiv,nhi->nhv", S, k[:, t]))
        S = S + k[:, t][..., None] * d[..., None, :]                         # delta rule
        out[:, t] = scale * np.einsum("nhiv,nhi->nhv", S, q[:, t])
        if states is not None:
            states.append(np.swapaxes(S, -1, -2).copy())
        if deltas is not None:
            deltas.append(d)
        if parents is not None:
            after.append(S)
    return out, np.swapaxes(S, -1, -2)


def replay(state: Any, k: Any, d: Any, g: Any, *, head_map: str = "tiled") -> Floats:
    """The states after 0, 1, ... n entries of a token log, (n + 1, H_v, S_v, S_k) in float64: S <- exp(g) S + k d^T.

    state (H_v, S_v, S_k); k (n, H_k, S_k) as the rule used it, d (n, H_v, S_v), g (n, H_v) or (n, H_v, S_k).
    """
    state, k, d, g = (np.asarray(x, np.float64) for x in (state, k, d, g))
    k = k[:, head_index(k.shape[1], d.shape[1], head_map)]
    states = [state]
    a = np.exp(g if g.ndim == 3 else g[..., None])
    for k_t, d_t, a_t in zip(k, d, a, strict=True):
        states.append(a_t[:, None] * states[-1] + d_t[..., None] * k_t[:, None])
    return np.stack(states)


def chunked(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None, *,
            chunk: int = 32, scale: float | None = None, head_map: str = "tiled", qk_l2norm: bool = False,
            l2_eps: float = 1e-6, l2_form: str = "sum", beta_logit: bool = False,
            trace: list[dict[str, Any]] | None = None) -> tuple[Floats, Floats]:
    """The chunked form: one unit lower triangular solve per chunk.  Returns (out, state) in float64.

    ``trace``: a list that receives one dict per chunk with Gamma (n, H, i, j, c), e (n, H, i, c), A, P
    (n, H, i, j) and X (n, H, i, S_v); c is the key channel, of extent 1 for the scalar gate.
    """
    q, k, v, g, beta, S, scale = _prepare(q, k, v, g, beta, state, scale, head_map, qk_l2norm, l2_eps, l2_form,
                                          beta_logit)
    out = np.zeros(v.shape)
    for start in range(0, v.shape[1], chunk):
        rows = slice(start, start + chunk)
        Q, K, V, a = (np.moveaxis(x[:, rows], 1, 2) for x in (q, k, v, np.exp(g)))     # (n, H, C, .)
        b = np.moveaxis(beta[:, rows], 1, 2)[..., None]                                # (n, H, C, 1)
        C = Q.shape[2]
        e = np.cumprod(a, 2)                                  # decay of tokens 1..i
        Gamma = np.zeros(a.shape[:2] + (C, C, a.shape[-1]))   # decay of tokens j+1..i, as running products
        for i in range(C):
            Gamma[:, :, i, :i] = Gamma[:, :, i - 1, :i] * a[:, :, i, None]
            Gamma[:, :, i, i] = 1
        A = b * np.tril(_pairs(K, K, Gamma), -1)
        P = _pairs(Q, K, Gamma)                               # zero above the diagonal, as Gamma is
        X = np.linalg.solve(np.eye(C) + A, b * (V - (e * K) @ S))
        out[:, rows] = np.moveaxis(scale * ((e * Q) @ S + P @ X), 2, 1)
        S = e[:, :, -1, :, None] * S + np.swapaxes(Gamma[:, :, -1] * K, -1, -2) @ X
        if trace is not None:
            trace.append({"Gamma": Gamma, "e": e, "A": A, "P": P, "X": X})
    return out, np.swapaxes(S, -1, -2)


def _pairs(rows: Any, columns: Any, Gamma: Any) -> Any:
    """sum_c rows[i,c] columns[j,c] Gamma[i,j,c], for a Gamma of one or of S_k channels."""
    if Gamma.shape[-1] == 1:
        return rows @ np.swapaxes(columns, -1, -2) * Gamma[..., 0]
    return np.einsum("nhic,nhjc,nhijc->nhij", rows, columns, Gamma)
