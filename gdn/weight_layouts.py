"""Forms in which checkpoints keep a layer's weights, and the flat one that the layer multiplies by.

    qkvz            rows grouped per key head: q S_k | k S_k | v r S_v | z r S_v, with r = H_v / H_k
    qkv, z          rows q | k | v over all heads, z apart;  q, k, v, z  all apart
    ba              rows grouped per key head: b r | a r;    b, a  apart
    conv            channels q | k | v;  conv_q, conv_k, conv_v  apart; their biases conv_bias, conv_bias_q, ...
"""

import numpy as np

EXTENTS = ("n_embd", "H_k", "H_v", "S_k", "S_v", "width")
JOINED = {"qkv": ("q", "k", "v"), "conv": ("conv_q", "conv_k", "conv_v"),
          "conv_bias": ("conv_bias_q", "conv_bias_k", "conv_bias_v")}


def check_extents(c):
    """ValueError: an extent of the config is no positive integer."""
    for name in EXTENTS:
        if isinstance(c[name], bool) or not isinstance(c[name], (int, np.integer)) or c[name] < 1:
            raise ValueError(f"config: {name} must be a positive integer, got {c[name]!r}")


def rows(c):
    """Rows of every projection of the layer's input, in every form."""
    key, value = c["H_k"] * c["S_k"], c["H_v"] * c["S_v"]
    return {"q": key, "k": key, "v": value, "z": value, "qkv": 2 * key + value, "qkvz": 2 * key + 2 * value,
            "b": c["H_v"], "a": c["H_v"], "ba": 2 * c["H_v"]}


def flat(weights, c):
    """The weights with qkv, z, b, a and conv in their flat form, whichever they came in; the rest as it is."""
    w, r = dict(weights), c["H_v"] // c["H_k"]
    for fused, names, sizes in (("qkvz", "qkvz", (c["S_k"], c["S_k"], r * c["S_v"], r * c["S_v"])),
                                ("ba", "ba", (r, r))):
        if w.get(fused) is not None:
            _add(w, dict(zip(names, _ungroup(w.pop(fused), fused, c["H_k"], sizes), strict=True)))
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


def _add(w, parts):
    for name, value in parts.items():
        if w.get(name) is not None:
            raise ValueError(f"weights have {name} in two forms")
        w[name] = value


def _ungroup(x, name, n_groups, sizes):
    """Groups of `sizes` rows, one group a key head, as one array for each size."""
    if len(x) != n_groups * sum(sizes):
        raise ValueError(f"weights: {name} has {len(x)} rows, expected {n_groups * sum(sizes)}")
    groups = np.reshape(x, (n_groups, sum(sizes), -1))
    return [part.reshape(n_groups * part.shape[1], -1) for part in np.split(groups, np.cumsum(sizes)[:-1], axis=1)]
