"""Whole linear-attention layers: Gated DeltaNet and Kimi Delta Attention, hidden states in, hidden states out."""

from collections.abc import Mapping
from dataclasses import fields, replace

import numpy as np

from gdn import _core, reference, weight_layouts
from gdn.batch import Batch
from gdn.layer_config import LayerConfig, finite
from gdn.ring import Step

__all__ = ["GatedDeltaNet", "KimiDeltaAttention"]

FLOAT32 = np.dtype(np.float32)
ALONE = 1024      # calls of fewer tokens run their kernels on one thread: BLAS's threads still spin on the other cores
KEPT = 64         # calls of fewer tokens leave their arrays to the next


def _float32(name, x):
    """x, which must be of that type already: nothing is cast."""
    if not isinstance(x, np.ndarray) or x.dtype != FLOAT32:
        raise TypeError(f"{name} must be a float32 array, got {getattr(x, 'dtype', type(x).__name__)}")
    return x


class _Layer:
    """What both kinds share: weights in one flat form, the steps, the trace."""

    def __init__(self, weights, config, lora=None, lora_order="checkpoint"):
        if not isinstance(weights, Mapping) or not isinstance(config, (LayerConfig, Mapping)):
            raise TypeError(f"weights must be a mapping and config a gdn.LayerConfig or a mapping of its fields, got "
                            f"{type(weights).__name__} and {type(config).__name__}")
        config = config if isinstance(config, LayerConfig) else LayerConfig(**config)
        if config.kind != self.KIND:
            raise ValueError(f"config: kind is {config.kind!r}, {type(self).__name__} needs {self.KIND!r}")
        self.config = config
        vars(self).update((x.name, getattr(config, x.name)) for x in fields(config))
        self.key_size, self.value_size, self.C = self.H_k * self.S_k, self.H_v * self.S_v, config.channels
        self.tag = config.tag     # of `StateRing.create`, and what it needs to know of the layer
        self.extents = {"H_k": self.H_k, "H_v": self.H_v, "S_k": self.S_k, "S_v": self.S_v,
                        "per_channel": self.KIND == "kda", "head_map": self.head_map, "conv_channels": self.C,
                        "conv_width": self.width}
        w = self._check_weights(weight_layouts.flat(weights, config))
        self.conv, self.conv_bias = w["conv"], w.get("conv_bias")
        self.A, self.dt_bias = w["A"], w["dt_bias"]
        self.norm = np.float32(self.output_gate_factor) * (np.float32(self.norm_offset) + w["norm"])
        # One matmul of all projections of x; each is a slice of its columns.  Weights lie column by column, as BLAS packs
        # them fastest: half the time for 2 to 16 tokens.
        inputs = weight_layouts.inputs(config)
        self.inputs = np.asfortranarray(np.concatenate([w[name] for name in inputs]))
        self.out = np.asfortranarray(w["out"])
        ends = np.cumsum([len(w[name]) for name in inputs])
        self.columns = {name: slice(end - len(w[name]), end) for name, end in zip(inputs, ends, strict=True)}
        # {what comes of it: (the projection it multiplies, its weight, its name)}
        self.low_rank = {high: (f"{low}_a", w[f"{low}_b"], f"{low}_b") for low, high in (("f", "a"), ("g", "z"))
                         if f"{low}_b" in w}
        self.lora = self._check_lora({} if lora is None else lora, lora_order)
        self._spare = {}          # _Arrays of the last call of few tokens, by their number

    def __setattr__(self, name, value):
        if "_spare" in self.__dict__ and not name.startswith("_"):
            raise AttributeError(f"{name}: a layer stays what it was made of")       # kept _Arrays have read it
        object.__setattr__(self, name, value)

    def __getstate__(self):
        return {**self.__dict__, "_spare": {}}        # copies of views would no longer be views

    # ---- loading ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_state_dict(cls, weights, prefix, config, lora=None, *, lora_order="checkpoint", overrides=None):
        """From transformers' names: see `gdn.adapters.state_dict.read_layer`."""
        from gdn.adapters import state_dict

        return cls(*state_dict.read_layer(weights, prefix, config, overrides), lora, lora_order)

    @classmethod
    def from_gguf(cls, path, block, lora=None, *, lora_order="checkpoint", overrides=None):
        """A block of a GGUF file, read through the `gguf` package: see `gdn.adapters.gguf.read_layer`.

        ValueError for a file or a block that holds none such, and as of the class.
        """
        from gdn.adapters import gguf

        return cls(*gguf.read_layer(path, block, overrides), lora, lora_order)

    def _check_weights(self, weights):
        shapes = weight_layouts.shapes(self.config)
        needed = [*weight_layouts.inputs(self.config), "conv", "A", "dt_bias", "norm", "out"]
        needed += [f"{name[0]}_b" for name in needed if name in ("f_a", "g_a")]
        unknown = sorted(set(weights) - {*needed, "conv_bias"})
        if unknown:
            raise ValueError(f"weights: unknown {', '.join(unknown)}; expected {', '.join(needed)}, conv_bias")
        checked = {}
        for name in (*needed, "conv_bias"):
            if weights.get(name) is None:
                if name == "conv_bias":
                    continue
                raise ValueError(f"weights lack {name}, expected shape {shapes[name]}")
            checked[name] = np.array(_float32(f"weights: {name}", weights[name]), order="C")     # the layer's own
            if checked[name].shape != shapes[name]:
                raise ValueError(f"weights: {name} has shape {checked[name].shape}, expected {shapes[name]}")
        if not (checked["A"] <= 0).all():
            raise ValueError(f"weights: A must be -exp(A_log), 0 or less, got {checked['A'][~(checked['A'] <= 0)][0]}")
        return checked

    def _check_lora(self, lora, order):
        """{flat projection: [(A, scale * B)]} in the layer's own order of heads."""
        if order not in ("checkpoint", "file"):
            raise ValueError(f"lora_order must be \"checkpoint\" or \"file\", got {order!r}")
        if not isinstance(lora, Mapping):
            raise TypeError(f"lora must map projections to pairs, got {type(lora).__name__}")
        # Rows are told apart in the order they come in, and put into the layer's after that.
        came = replace(self.config, head_map="interleaved") if order == "checkpoint" else self.config
        retile = self.config.is_tiled and not came.is_tiled
        shapes = {name: shape for name, shape in weight_layouts.shapes(came).items()
                  if len(shape) == 2 and not name.startswith("conv")}
        checked = {}
        for name, pairs in lora.items():
            slot = name if name in shapes else came.projections.get(name)
            if slot not in shapes:
                raise ValueError(f"lora: unknown projection {name!r}, expected one of "
                                 f"{', '.join((*shapes, *came.projections))}")
            for pair in pairs if isinstance(pairs, (list, tuple)) else [None]:
                A, B = self._check_pair(name, pair, shapes[slot])
                for flat, part in weight_layouts.spread(slot, B, came).items():
                    if retile and flat == "out":
                        A = weight_layouts.tile(flat, A, came, axis=1)
                    elif retile and flat not in ("f_a", "g_a"):
                        part = weight_layouts.tile(flat, part, came)
                    checked.setdefault(flat, []).append((A, part))
        return checked

    @staticmethod
    def _check_pair(name, pair, shape):
        """(A, scale * B) of one of the pairs for a projection of that shape."""
        if not isinstance(pair, (list, tuple)) or len(pair) != 3:
            raise ValueError(f"lora: {name} must be a list of (A, B, scale), got {pair!r:.80}")
        A, B, scale = pair
        A, B = (np.array(_float32(f"lora: {name}", x), order="C") for x in (A, B))      # the layer's own
        scale = np.float32(finite(f"lora: the scale of {name}", scale))
        if A.ndim != 2 or A.shape[1] != shape[1] or B.shape != (shape[0], len(A)):
            raise ValueError(f"lora: {name} has A {A.shape} and B {B.shape}, expected (r, {shape[1]}) and ({shape[0]}, r)")
        return A, B * scale

    # ---- the forward pass ------------------------------------------------------------------------------------------

    def __call__(self, x, batch, step, il, *, mode="auto", n_threads=None, trace=None):
        """The layer's output (n_tokens, n_embd) for hidden states x of the same shape, float32; the ring is updated.

        batch     the `Batch` that step began with, or an equal one;  step: from ``ring.begin(batch)``;  il: the ring's
                  layer
        mode      of the delta rule: "auto", "chunked", "recurrent";  n_threads: of everything but the matmuls (BLAS);
                  None is one for fewer than 1024 tokens
        trace     a dict that receives every intermediate, token-major in the batch's order, zeros for padding:
                  qkv_mixed (n, C), z (n, H_v, S_v), b (n, H_v) logits, a and gate (n, H_v[, S_k]), beta (n, H_v),
                  conv_output_silu (n, C), q and k (n, H_k, S_k) after the L2 norm, v, attn_output and attn_out_norm
                  (n, H_v, S_v), linear_attn_out (n, n_embd)

        Padding never changes a bit of anything.  A step holds one call for each layer of the ring: a second moves the
        state on again.  ValueError: shapes that do not fit, a step that is over or of another batch, mode, n_threads;
        TypeError: x is not float32, batch, step or trace something else, il or n_threads no integer; IndexError: no
        such layer.  A call that raises any of them has written nothing.
        """
        self._check_call(x, batch, step, trace)
        n = batch.n_grouped
        if n_threads is None and n < ALONE:
            n_threads = 1
        t = self._spare.pop(n, None) or _Arrays(self, n)          # a thread at a time has them
        t.kernels.bind(step, batch.cu_seqlens, il, mode, n_threads)
        # In one order whatever the batch: BLAS rounds another way where rows lie another way.
        self._project(np.ascontiguousarray(batch.gather(x)), t)
        see = None if trace is None else _Trace(trace, batch)
        if see:
            see(qkv_mixed=t.qkv, z=t.z, b=t.b, a=t.a)
        t.kernels.convolve()
        if see:
            q, k = (_core.l2_norm(x, self.l2_eps, form=self.l2_form) for x in (t.q, t.k))
            see(conv_output_silu=t.qkv, q=q, k=k, v=t.v)
        t.kernels.gate()
        if see:
            see(gate=t.a, beta=reference.sigmoid(t.b).astype(np.float32) if self.beta_factor == 1 else t.b)
        t.kernels.update()
        if see:
            see(attn_output=t.v)
        t.kernels.norm()
        y = self._matmul("out", t.values, self.out)
        if see:
            see(attn_out_norm=t.v, linear_attn_out=y[None])
        if n < KEPT:
            self._spare = {n: t}
        return batch.scatter(y)

    def _check_call(self, x, batch, step, trace):
        _float32("x", x)
        if not isinstance(batch, Batch) or not isinstance(step, Step):
            raise TypeError(f"batch and step must be a gdn.Batch and what ring.begin(batch) gave, got "
                            f"{type(batch).__name__} and {type(step).__name__}")
        if not isinstance(trace, (dict, type(None))):
            raise TypeError(f"trace must be a dict, got {type(trace).__name__}")
        if x.shape != (batch.n_tokens, self.n_embd):
            raise ValueError(f"x has shape {x.shape}, expected ({batch.n_tokens}, {self.n_embd}): "
                             f"the batch's tokens, n_embd")
        if not step.is_open:
            raise ValueError("the step is already committed or aborted")
        began = np.full(len(step.seq_ids), -1) if step.batch is None else step.batch.first_positions
        if step.batch is not batch and not (
                np.array_equal(step.seq_ids, batch.unique_ids) and np.array_equal(step.n_tokens, batch.lengths)
                and np.array_equal(began, batch.first_positions) and np.array_equal(step.parents, batch.parents)):
            raise ValueError(f"the step is of sequences {step.seq_ids} with {step.n_tokens} tokens from {began}, the "
                             f"batch of {batch.unique_ids} with {batch.lengths} from {batch.first_positions} (-1: on)")

    def _matmul(self, name, x, weight, out=None):
        y = self._product(x, weight, out)
        self._add_lora(name, x, y)
        return y

    @staticmethod
    def _product(x, weight, out=None):
        return np.matmul(x, weight.T, out=out)

    def _add_lora(self, name, x, y):
        for A, B in self.lora.get(name, ()):
            y += (x @ A.T) @ B.T

    def _project(self, x, t):
        self._product(x, self.inputs, t.inputs)
        if self.lora:
            for name in self.columns:
                self._add_lora(name, x, t.parts[name])
        for high, (low, weight, name) in self.low_rank.items():
            self._matmul(name, t.parts[low], weight, t.parts[high])


class GatedDeltaNet(_Layer):
    """The linear-attention layer of Qwen3-Next, Qwen3.5, Qwen4-exp, Lara-mini and OLMo-Hybrid (arXiv 2412.06464).

    config    a `gdn.LayerConfig` of kind "gdn" (KIND), or a mapping of its fields
    weights   float32, rows are outputs: qkv (C, n_embd) with rows q | k | v over heads, C = 2 H_k S_k + H_v S_v;
              z (H_v S_v, n_embd); b, a (H_v, n_embd); conv (C, width), conv_bias (C,) or none; A (H_v,) = -exp(A_log);
              dt_bias (H_v,); norm (S_v,); out (n_embd, H_v S_v).  With ranks f_a (r, n_embd), f_b (H_v, r) in place of
              a, g_a (r, n_embd), g_b (H_v S_v, r) in place of z.  Fused or separate forms: see `gdn.weight_layouts`
    lora      float32 {projection: [(A (r, inputs), B (outputs, r), scale), ...]}: y += scale * B (A x), by the names above,
              of any form, or by those that the weights were loaded under (in_proj_qkvz, ssm_ba, ...)
    lora_order    how the pairs count value heads: "checkpoint", grouped by key head, as adapters are trained whatever
              file the weights come from; "file": as the layer's weights do

    ValueError names what is missing or mis-shaped and what was expected, and refuses A > 0 or NaN, and weights grouped
    per key head where head_map is "tiled"; TypeError: an array that is not float32.
    """

    KIND = "gdn"


class KimiDeltaAttention(_Layer):
    """The linear-attention layer of Kimi-Linear, GLM-5-Next and Bailing-hybrid (arXiv 2510.26692): a gate per key channel.

    As `GatedDeltaNet`, but kind "kda" (KIND), a (H_v S_k, n_embd) or f_b (H_v S_k, r), and dt_bias (H_v S_k,).
    """

    KIND = "kda"


class _Arrays:
    """What a call of n tokens works on: the projection of x, and views of it.

    A call of few tokens keeps them for the next: after a matmul has emptied the caches, making the views takes as
    long as a kernel.  The views have a first axis of one, as the kernels want sequences that lie packed.
    """

    def __init__(self, layer, n):
        self.inputs = np.empty((n, len(layer.inputs)), np.float32)
        self.parts = {name: self.inputs[:, columns] for name, columns in layer.columns.items()}
        for name, (_, weight, _) in layer.low_rank.items():
            self.parts[name] = np.empty((n, len(weight)), np.float32)
        qkv, q_end, k_end = self.parts["qkv"], layer.key_size, 2 * layer.key_size
        self.qkv, self.b, self.values = qkv[None], self.parts["b"][None], qkv[:, k_end:]
        self.q = qkv[:, :q_end].reshape(1, n, layer.H_k, layer.S_k)
        self.k = qkv[:, q_end:k_end].reshape(1, n, layer.H_k, layer.S_k)
        self.v = self.values.reshape(1, n, layer.H_v, layer.S_v)
        self.z = self.parts["z"].reshape(1, n, layer.H_v, layer.S_v)
        self.a = self.parts["a"][None]
        if layer.KIND == "kda":
            self.a = self.a.reshape(1, n, layer.H_v, layer.S_k)
        self.kernels = _core.LayerKernels(layer, self)


class _Trace:
    """Copies of intermediates, in the batch's order, as the steps go on to work in place."""

    def __init__(self, trace, batch):
        self.trace, self.batch = trace, batch

    def __call__(self, **arrays):
        self.trace.update((name, self.batch.scatter(np.array(x[0]))) for name, x in arrays.items())
