"""Forms in which checkpoints keep a layer's weights, and the flat one that the layer multiplies by.

    qkvz            rows grouped per key head: q S_k | k S_k | v r S_v | z r S_v, with r = H_v / H_k
    qkv, z          rows q | k | v over all heads, z apart;  q, k, v, z  all apart
    ba              rows grouped per key head: b r | a r;    b, a  apart
    qkvzba          rows q | k | v | z | b | a over all heads
    a, z            full rank;  f_b f_a in place of a, g_b g_a in place of z: low rank
    conv            channels q | k | v;  conv_q, conv_k, conv_v  apart; their biases conv_bias, conv_bias_q, ...

c is a `gdn.LayerConfig` throughout.
"""

import numpy as np

JOINED = {"qkv": ("q", "k", "v"), "conv": ("conv_q", "conv_k", "conv_v"),
          "conv_bias": ("conv_bias_q", "conv_bias_k", "conv_bias_v")}


def rows(c):
    """Rows of every full-rank projection of the layer's input, in every form."""
    key, value = c.H_k * c.S_k, c.H_v * c.S_v
    a = c.H_v * c.S_k if c.kind == "kda" else c.H_v
    n = {"q": key, "k": key, "v": value, "z": value, "qkv": c.channels, "qkvz": c.channels + value, "b": c.H_v, "a": a}
    return n if c.kind == "kda" else n | {"ba": 2 * c.H_v, "qkvzba": c.channels + value + 2 * c.H_v}


def inputs(c):
    """The flat projections of the layer's input, in the order of its matmul."""
    return "qkv", "f_a" if c.f_rank else "a", "g_a" if c.g_rank else "z", "b"


def shapes(c):
    """{name: shape} of every weight in every form; of `inputs`, f_b and g_b as c's ranks say."""
    n = rows(c)
    table = {name: (count, c.n_embd) for name, count in n.items()}
    for low, high, rank in (("f", "a", c.f_rank), ("g", "z", c.g_rank)):
        if rank:                 # no form that holds the rows of the full-rank projection, which its name says
            table = {name: shape for name, shape in table.items() if high not in name.split("_")[0]}
            table |= {f"{low}_a": (rank, c.n_embd), f"{low}_b": (n[high], rank)}
    for x in ("", "_q", "_k", "_v"):
        count = n["qkv" if x == "" else x[1]]
        table |= {f"conv{x}": (count, c.width), f"conv_bias{x}": (count,)}
    return table | {"A": (c.H_v,), "dt_bias": (n["a"],), "norm": (c.S_v,), "out": (c.n_embd, n["v"])}


def flat(weights, c):
    """The weights with qkv, z, b, a and conv in their flat form, whichever they came in; the rest as it is.

    ValueError: a weight in two forms or in parts of one, or grouped per key head where c's value heads are tiled.
    """
    w, r = dict(weights), c.H_v // c.H_k
    if w.get("qkvzba") is not None:
        n = rows(c)
        ends = np.cumsum([n[name] for name in ("qkv", "z", "b")])
        _check_rows(w["qkvzba"], "qkvzba", n["qkvzba"])
        _add(w, dict(zip(("qkv", "z", "b", "a"), np.split(w.pop("qkvzba"), ends), strict=True)))
    for fused, sizes in (("qkvz", (c.S_k, c.S_k, r * c.S_v, r * c.S_v)), ("ba", (r, r))):
        if w.get(fused) is not None:
            if c.is_tiled:
                raise ValueError(f"weights: {fused} is grouped per key head, the layer's value heads are tiled")
            _add(w, dict(zip(fused, _ungroup(w.pop(fused), fused, c.H_k, sizes), strict=True)))
    for joined, names in JOINED.items():
        parts = [w.pop(name) for name in names if w.get(name) is not None]
        if len(parts) == len(names):
            _add(w, {joined: np.concatenate(parts)})
        elif parts:
            raise ValueError(f"weights: {', '.join(names)} go together, only {len(parts)} of them are there")
    return w


def spread(name, x, c):
    """Rows of one projection in any form, as flat {name: rows}; rows of qkv that it does not have are zero."""
    parts = {name: x}
    if name in JOINED["qkv"]:
        parts = {q: x if q == name else np.zeros((rows(c)[q], x.shape[1]), x.dtype) for q in JOINED["qkv"]}
    return flat(parts, c)


def tile(name, x, c, axis=0):
    """A flat weight of the checkpoint's head order along ``axis``, in that of tiled value heads.

    Value head i * H_k + h of the result is head h * r + i of x: those that share key head h lie H_k apart.
    """
    n_rows = x.shape[axis]
    start = 2 * c.H_k * c.S_k if name in ("qkv", "conv", "conv_bias") else 0
    heads = np.arange(c.H_v).reshape(c.H_k, -1).T.ravel()
    order = np.arange(start, n_rows).reshape(c.H_v, -1)[heads].ravel()
    return np.take(x, np.concatenate([np.arange(start), order]), axis)


def _add(w, parts):
    for name, value in parts.items():
        if w.get(name) is not None:
            raise ValueError(f"weights have {name} in two forms")
        w[name] = value


def _check_rows(x, name, expected):
    if len(x) != expected:
        raise ValueError(f"weights: {name} has {len(x)} rows, expected {expected}")


def _ungroup(x, name, n_groups, sizes):
    """Groups of `sizes` rows, one group a key head, as one array for each size."""
    _check_rows(x, name, n_groups * sum(sizes))
    groups = np.reshape(x, (n_groups, sum(sizes), -1))
    return [part.reshape(n_groups * part.shape[1], -1) for part in np.split(groups, np.cumsum(sizes)[:-1], axis=1)]
