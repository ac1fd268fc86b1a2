"""From named tensors, whatever their file format, to what a layer is made of."""

import math

import numpy as np

from gdn.layer import Projection

QKVZ = ("qkvz",), ("qkv", "z"), ("q", "k", "v", "z")
QKV = ("qkv",), ("q", "k", "v")
BA = ("ba",), ("b", "a")
CONV = ("conv",), ("conv_q", "conv_k", "conv_v")
DECAY = ("A",), ("A_log",)


class Source:
    """The tensors of one layer, asked for by slot.

    names    {slot: names that it may have}, without the prefix that all tensors of the layer share
    shape_of a function from a name to its shape, or to None if there is no such tensor
    read     a function from a name to its values, float32
    """

    def __init__(self, names, prefix, shape_of, read):
        self.names, self.prefix, self.shape_of, self.read, self.used = names, prefix, shape_of, read, set()

    def find(self, slot):
        return next((name for name in self.names.get(slot, ()) if self.shape_of(name) is not None), None)

    def pick(self, forms):
        """The form whose slots are all there, else the one that comes closest, for `take` to say what is missing."""
        forms = [form for form in forms if all(slot in self.names for slot in form)]
        return max(forms, key=lambda form: sum(self.find(slot) is not None for slot in form) / len(form))

    def take(self, slot, *shape):
        """The slot's tensor in that shape; axes of 1 may be there or not."""
        name = self.find(slot)
        if name is None:
            names = " or ".join(self.prefix + name for name in self.names[slot])
            raise ValueError(f"tensor {names} is missing, expected with shape {shape}")
        return self._take(name, shape)

    def _take(self, name, shape):
        have = tuple(int(n) for n in self.shape_of(name))
        if [n for n in have if n != 1] != [n for n in shape if n != 1]:
            raise ValueError(f"tensor {self.prefix}{name} has shape {have}, expected {shape}")
        self.used.add(name)
        return self.read(name).reshape(shape)

    def bias(self, slot, rows):
        """What is called as the slot's weight, but .bias; None without one."""
        name = self.find(slot).removesuffix(".weight") + ".bias"
        return None if self.shape_of(name) is None else self._take(name, (rows,))

    def projection(self, targets, n_in, names=None):
        """One Projection of several slots; targets {slot: slice or index array of the outputs it makes}."""
        parts = {}
        for slot, where in targets.items():
            rows = len(where) if isinstance(where, np.ndarray) else where.stop - where.start
            weight = self.take(slot, rows, n_in)
            parts[self.find(slot).removesuffix(".weight")] = weight, self.bias(slot, rows), where
        return Projection(parts, names)

    def convolution(self, channels, width):
        """(weight, bias) over q | k | v side by side, bias None without one."""
        slots = self.pick(CONV)
        sizes = [channels["qkv"]] if slots == ("conv",) else [channels[name] for name in "qkv"]
        sizes = [s.stop - s.start for s in sizes]
        weights = [self.take(slot, n, width) for slot, n in zip(slots, sizes, strict=True)]
        biases = [self.bias(slot, n) for slot, n in zip(slots, sizes, strict=True)]
        if all(b is None for b in biases):
            return np.concatenate(weights), None
        return np.concatenate(weights), np.concatenate(
            [np.zeros(n, np.float32) if b is None else b for b, n in zip(biases, sizes, strict=True)])

    def decay(self, H, *bias_shape):
        """(A, dt_bias), A = -exp(A_log) where that is stored."""
        slot, = self.pick(DECAY)
        A = self.take(slot, H)
        if slot == "A_log":
            with np.errstate(over="ignore"):          # -inf is a decay too
                A = -np.exp(A)
        return A, self.take("dt_bias", math.prod(bias_shape))


def ranges(**sizes):
    """Slices of those sizes, one behind the other."""
    result, start = {}, 0
    for name, size in sizes.items():
        result[name] = slice(start, start + size)
        start += size
    return result


def grouped(H_k, *slices):
    """Where rows go that are stored key head by key head, each with its share of every slice."""
    return np.concatenate([np.arange(s.start, s.stop).reshape(H_k, -1) for s in slices], axis=1).ravel()


def gated_delta_net(source, c):
    """The arguments of gdn.GatedDeltaNet."""
    key, value = c.H_k * c.S_k, c.H_v * c.S_v
    at = ranges(q=key, k=key, v=value, z=value, b=c.H_v, a=c.H_v)
    at["qkv"] = slice(0, at["v"].stop)
    at["qkvz"] = grouped(c.H_k, at["q"], at["k"], at["v"], at["z"])
    at["ba"] = grouped(c.H_k, at["b"], at["a"])
    slots = source.pick(QKVZ) + source.pick(BA)
    flat = {name: at[name] for name in ("q", "k", "v", "qkv", "z", "b", "a")}
    return (c, source.projection({slot: at[slot] for slot in slots}, c.n_embd, flat),
            *source.convolution(at, c.conv_width), *source.decay(c.H_v, c.H_v), source.take("norm", c.S_v),
            source.projection({"out": slice(0, c.n_embd)}, value, {"out": slice(0, c.n_embd)}))


def kimi_delta_attention(source, c):
    """The arguments of gdn.KimiDeltaAttention."""
    key, value = c.H_k * c.S_k, c.H_v * c.S_v
    ranks = {slot: _rank(source, slot, c.S_v) for slot in ("f_a", "g_a")}
    at = ranges(q=key, k=key, v=value, b=c.H_v, **ranks)
    at["qkv"] = slice(0, at["v"].stop)
    slots = *source.pick(QKV), "b", "f_a", "g_a"
    second = [source.projection({slot: slice(0, n)}, rank, {slot: slice(0, n), alias: slice(0, n)})
              for slot, alias, n, rank in (("f_b", "a", c.H_v * c.S_k, ranks["f_a"]),
                                           ("g_b", "z", value, ranks["g_a"]))]
    return (c, source.projection({slot: at[slot] for slot in slots}, c.n_embd, at), *second,
            *source.convolution(at, c.conv_width), *source.decay(c.H_v, c.H_v, c.S_k), source.take("norm", c.S_v),
            source.projection({"out": slice(0, c.n_embd)}, value, {"out": slice(0, c.n_embd)}))


def _rank(source, slot, expected):
    """Rows of a low-rank pair's first half: any, `expected` if it is missing."""
    name = source.find(slot)
    return expected if name is None else int(source.shape_of(name)[0])
