"""Whole linear-attention layers: Gated DeltaNet and Kimi Delta Attention, hidden states in, hidden states out."""

from collections.abc import Mapping

import numpy as np

from gdn import _core, reference, weight_layouts
from gdn.batch import Batch
from gdn.ring import Step

__all__ = ["GatedDeltaNet", "KimiDeltaAttention"]

FLOAT32 = np.dtype(np.float32)
FLOAT32_MAX = float(np.finfo(np.float32).max)
ALONE = 1024      # calls of fewer tokens run their kernels on one thread: BLAS's threads still spin on the other cores
KEPT = 64         # calls of fewer tokens leave their arrays to the next
CHOICES = {"head_map": ("tiled", "interleaved"), "l2_form": ("sum", "max"), "activation": ("silu", "sigmoid")}


def _float32(name, x):
    """x, which must be of that type already: nothing is cast."""
    if not isinstance(x, np.ndarray) or x.dtype != FLOAT32:
        raise TypeError(f"{name} must be a float32 array, got {getattr(x, 'dtype', type(x).__name__)}")
    return x


def _finite(name, x):
    """x, a number that float32 holds."""
    if isinstance(x, bool) or not isinstance(x, (int, float, np.integer, np.floating)) or not abs(x) <= FLOAT32_MAX:
        raise ValueError(f"{name} must be a finite number, got {x!r}")
    return float(x)


class _Layer:
    """What both kinds share: weights in one flat form, the steps, the trace."""

    def __init__(self, weights, config, lora=None):
        for name, x in (("weights", weights), ("config", config)):
            if not isinstance(x, Mapping):
                raise TypeError(f"{name} must be a mapping, got {type(x).__name__}")
        self._read_config(config)
        w = self._check_weights(weight_layouts.flat(weights, config))
        self.conv, self.conv_bias = w["conv"], w.get("conv_bias")
        self.A, self.norm, self.out = w["A"], w["norm"], w["out"]
        self.dt_bias = w["dt_bias"]
        # One matmul of all projections of x; each is a slice of its columns.
        self.inputs = np.concatenate([w[name] for name in self.INPUTS])
        ends = np.cumsum([len(w[name]) for name in self.INPUTS])
        self.columns = {name: slice(end - len(w[name]), end) for name, end in zip(self.INPUTS, ends, strict=True)}
        self.low_rank = {name: w[name] for name in self.LOW_RANK}
        self.lora = self._check_lora(lora or {}, w, config)
        self._spare = {}          # _Arrays of the last call of few tokens, by their number

    def __setattr__(self, name, value):
        if "_spare" in self.__dict__ and not name.startswith("_"):
            raise AttributeError(f"{name}: a layer stays what it was made of")       # kept _Arrays have read it
        object.__setattr__(self, name, value)

    def __getstate__(self):
        return {**self.__dict__, "_spare": {}}        # copies of views would no longer be views

    # ---- loading ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_state_dict(cls, weights, prefix, config, lora=None):
        """From transformers' names: see `gdn.adapters.state_dict.read_layer`."""
        from gdn.adapters import state_dict

        return cls(*state_dict.read_layer(weights, prefix, config), lora)

    @classmethod
    def from_gguf(cls, path, block, lora=None):
        """A block of a GGUF file, read through the `gguf` package; ValueError for a file that holds none such."""
        from gdn.adapters import gguf

        return cls(*gguf.read_layer(path, block), lora)

    def _read_config(self, config):
        needed = ("kind", *weight_layouts.EXTENTS, *CHOICES, "norm_eps", "l2_eps", "beta_factor")
        missing = [name for name in needed if name not in config]
        if missing:
            raise ValueError(f"config lacks {', '.join(missing)}")
        unknown = [str(name) for name in config if name not in (*needed, "lower_bound", "projections")]
        if unknown:
            raise ValueError(f"config: unknown {', '.join(unknown)}; expected {', '.join(needed)}, lower_bound")
        if config["kind"] != self.KIND:
            raise ValueError(f"config: kind is {config['kind']!r}, {type(self).__name__} needs {self.KIND!r}")
        weight_layouts.check_extents(config)
        for name in weight_layouts.EXTENTS:
            setattr(self, name, int(config[name]))
        for name, choices in CHOICES.items():
            if config[name] not in choices:
                raise ValueError(f"config: {name} must be one of {choices}, got {config[name]!r}")
            setattr(self, name, config[name])
        if self.H_v % self.H_k:
            raise ValueError(f"config: H_v = {self.H_v} is no multiple of H_k = {self.H_k}")
        self.norm_eps, self.l2_eps = _finite("config: norm_eps", config["norm_eps"]), _finite("config: l2_eps", config["l2_eps"])
        if self.norm_eps < 0 or self.l2_eps < 0:
            raise ValueError(f"config: norm_eps and l2_eps must not be negative, got {self.norm_eps} and {self.l2_eps}")
        self.beta_factor = _finite("config: beta_factor", config["beta_factor"])
        if self.beta_factor <= 0:
            raise ValueError(f"config: beta_factor must be positive, got {self.beta_factor}")
        lower_bound = config.get("lower_bound")
        self.lower_bound = None if lower_bound is None else _finite("config: lower_bound", lower_bound)
        if self.lower_bound is not None and self.lower_bound >= 0:
            raise ValueError(f"config: lower_bound is the least log decay, below 0, got {self.lower_bound}")
        self.key_size, self.value_size = self.H_k * self.S_k, self.H_v * self.S_v
        self.C = weight_layouts.rows(config)["qkv"]
        # What `StateRing.create` needs to know of the layer.
        self.extents = {"H_v": self.H_v, "S_k": self.S_k, "S_v": self.S_v, "conv_channels": self.C,
                        "conv_width": self.width}

    def _check_weights(self, weights):
        shapes = {"qkv": (self.C, self.n_embd), "b": (self.H_v, self.n_embd), "conv": (self.C, self.width),
                  "conv_bias": (self.C,), "A": (self.H_v,), "norm": (self.S_v,),
                  "out": (self.n_embd, self.value_size), **self._kind_shapes(weights)}
        unknown = sorted(set(weights) - set(shapes))
        if unknown:
            raise ValueError(f"weights: unknown {', '.join(unknown)}; expected {', '.join(shapes)}")
        checked = {}
        for name, shape in shapes.items():
            if weights.get(name) is None:
                if name == "conv_bias":
                    continue
                raise ValueError(f"weights lack {name}, expected shape {shape}")
            checked[name] = np.array(_float32(f"weights: {name}", weights[name]), order="C")     # the layer's own
            if checked[name].shape != shape:
                raise ValueError(f"weights: {name} has shape {checked[name].shape}, expected {shape}")
        return checked

    def _check_lora(self, lora, w, config):
        """Pairs by flat projection, B times scale; the names may be those that the weights came under."""
        came, shapes = config.get("projections", {}), {name: w[name].shape for name in (*self.LOW_RANK, "out")}
        shapes |= {name: (n, self.n_embd) for name, n in weight_layouts.rows(config).items()
                   if self.KIND == "gdn" or name in weight_layouts.JOINED["qkv"]}
        shapes |= {name: w[name].shape for name in self.INPUTS}
        checked = {}
        if not isinstance(lora, Mapping):
            raise TypeError(f"lora must map projections to pairs, got {type(lora).__name__}")
        for name, pairs in lora.items():
            slot = came.get(name, name)
            if slot not in shapes:
                raise ValueError(f"lora: unknown projection {name!r}, expected one of {', '.join((*shapes, *came))}")
            n_out, n_in = shapes[slot]
            for pair in pairs if isinstance(pairs, (list, tuple)) else [None]:
                if not isinstance(pair, (list, tuple)) or len(pair) != 3:
                    raise ValueError(f"lora: {name} must be a list of (A, B, scale), got {pairs!r:.80}")
                A, B, scale = pair
                A, B = (np.array(_float32(f"lora: {name}", x), order="C") for x in (A, B))      # the layer's own
                scale = np.float32(_finite(f"lora: the scale of {name}", scale))
                if A.ndim != 2 or A.shape[1] != n_in or B.shape != (n_out, len(A)):
                    raise ValueError(f"lora: {name} has A {A.shape} and B {B.shape}, expected (r, {n_in}) "
                                     f"and ({n_out}, r)")
                for flat, part in weight_layouts.spread(slot, B * scale, config).items():
                    checked.setdefault(flat, []).append((A, part))
        return checked

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
                and np.array_equal(began, batch.first_positions)):
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
            for name in self.INPUTS:
                self._add_lora(name, x, t.parts[name])


class GatedDeltaNet(_Layer):
    """The linear-attention layer of Qwen3-Next, Qwen3.5 and OLMo-Hybrid (arXiv 2412.06464).

    config    kind "gdn", n_embd, H_k, H_v, S_k, S_v, width, head_map ("tiled" or "interleaved"), norm_eps, l2_eps,
              l2_form, beta_factor (1, or 2 for beta in (0, 2)), activation of the gated norm ("silu" or "sigmoid")
    weights   float32, rows are outputs: qkv (C, n_embd) with rows q | k | v over heads, C = 2 H_k S_k + H_v S_v;
              z (H_v S_v, n_embd); b, a (H_v, n_embd); conv (C, width), conv_bias (C,) or none; A (H_v,) = -exp(A_log);
              dt_bias (H_v,); norm (S_v,); out (n_embd, H_v S_v).  Fused or separate forms: see `gdn.weight_layouts`
    lora      float32 {projection: [(A (r, inputs), B (outputs, r), scale), ...]}: y += scale * B (A x), by the names above,
              of any form, or by those that the weights were loaded under (in_proj_qkvz, ssm_ba, ...)

    ValueError names what is missing or mis-shaped and what was expected.
    """

    KIND = "gdn"
    INPUTS = ("qkv", "z", "b", "a")
    LOW_RANK = {}

    def _kind_shapes(self, weights):
        return {"z": (self.value_size, self.n_embd), "a": (self.H_v, self.n_embd), "dt_bias": (self.H_v,)}


class KimiDeltaAttention(_Layer):
    """The linear-attention layer of Kimi-Linear (arXiv 2510.26692): a gate per key channel.

    As `GatedDeltaNet`, but kind "kda"; lower_bound (a number or None) selects the bounded form of the gate; weights
    f_a (r, n_embd), f_b (H_v S_k, r) in place of a, g_a (r, n_embd), g_b (H_v S_v, r) in place of z, and
    dt_bias (H_v S_k,).
    """

    KIND = "kda"
    INPUTS = ("qkv", "b", "f_a", "g_a")
    LOW_RANK = {"f_b": "a", "g_b": "z"}

    def _kind_shapes(self, weights):
        rank = {name: len(weights[name]) if np.ndim(weights.get(name)) == 2 else 1 for name in ("f_a", "g_a")}
        return {"f_a": (rank["f_a"], self.n_embd), "f_b": (self.H_v * self.S_k, rank["f_a"]),
                "g_a": (rank["g_a"], self.n_embd), "g_b": (self.value_size, rank["g_a"]),
                "dt_bias": (self.H_v * self.S_k,)}

    def _project(self, x, t):
        super()._project(x, t)
        self._matmul("f_b", t.parts["f_a"], self.low_rank["f_b"], t.parts["a"])
        self._matmul("g_b", t.parts["g_a"], self.low_rank["g_b"], t.parts["z"])


class _Arrays:
    """What a call of n tokens works on: the projection of x, and views of it.

    A call of few tokens keeps them for the next: after a matmul has emptied the caches, making the views takes as
    long as a kernel.  The views have a first axis of one, as the kernels want sequences that lie packed.
    """

    def __init__(self, layer, n):
        self.inputs = np.empty((n, len(layer.inputs)), np.float32)
        self.parts = {name: self.inputs[:, columns] for name, columns in layer.columns.items()}
        for name, product in layer.LOW_RANK.items():
            self.parts[product] = np.empty((n, len(layer.low_rank[name])), np.float32)
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
