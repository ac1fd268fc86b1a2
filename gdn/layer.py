"""Token mixers of Qwen3-Next, Qwen3.5, OLMo-Hybrid (Gated DeltaNet) and Kimi-Linear (Kimi Delta Attention)."""

from dataclasses import dataclass

import numpy as np

from gdn._core import causal_conv1d_inplace, decay_gate, gated_delta_net_inplace, l2_norm, rms_norm_gated
from gdn._tensor import Tensor

__all__ = ["GatedDeltaNet", "KimiDeltaAttention", "LayerConfig", "Projection"]


@dataclass(frozen=True)
class LayerConfig:
    """Sizes and options of one layer.

    head_map     "interleaved" or "tiled": which key head a value head reads, `gated_delta_net`'s meaning
    eps          of the gated RMS norm;  activation "silu" or "sigmoid", of its gate
    beta_factor  beta = beta_factor * sigmoid(b): 1, or 2 for eigenvalues down to -1
    lower_bound  of the decay gate (`decay_gate`), or None
    l2_form      "sum" (transformers, FLA) or "max" (ggml), with l2_eps
    """

    n_embd: int
    H_k: int
    H_v: int
    S_k: int
    S_v: int
    conv_width: int
    head_map: str = "interleaved"
    eps: float = 1e-6
    activation: str = "silu"
    beta_factor: float = 1.0
    lower_bound: float | None = None
    l2_form: str = "sum"
    l2_eps: float = 1e-6

    def __post_init__(self):
        for name in ("n_embd", "H_k", "H_v", "S_k", "S_v", "conv_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.H_v % self.H_k:
            raise ValueError(f"H_v must be a multiple of H_k, got {self.H_v} and {self.H_k}")
        for name, known in (("head_map", ("interleaved", "tiled")), ("activation", ("silu", "sigmoid")),
                            ("l2_form", ("sum", "max"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")

    @property
    def conv_channels(self):
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.H_k * self.S_k + self.H_v * self.S_v

    @property
    def ring_extents(self):
        """What `StateRing.create` and `nbytes_for` need to know of the layer."""
        return {"H_v": self.H_v, "S_k": self.S_k, "S_v": self.S_v, "conv_channels": self.conv_channels,
                "conv_width": self.conv_width}


class Projection:
    """y = x W^T + bias for several weights of the same input, as one matrix product.

    parts  {name: (weight (rows, n_in), bias (rows,) or None, where)}; where is a slice or an index array: the outputs
           of y that the part's rows make
    names  {name: where} under which LoRA pairs are accepted too
    """

    def __init__(self, parts, names=None):
        n_out = sum(len(weight) for weight, _, _ in parts.values())
        n_in = next(iter(parts.values()))[0].shape[1]
        self.weight, self.bias = np.empty((n_out, n_in), np.float32), None
        if any(bias is not None for _, bias, _ in parts.values()):
            self.bias = np.zeros(n_out, np.float32)
        for weight, bias, where in parts.values():
            self.weight[where] = weight
            if bias is not None:
                self.bias[where] = bias
        self.names = {**(names or {}), **{name: where for name, (_, _, where) in parts.items()}}

    def __call__(self, x, lora=None):
        y = x @ self.weight.T
        if self.bias is not None:
            y += self.bias
        for name in self.names.keys() & (lora or {}).keys():
            for A, B, scale in lora[name]:
                y[:, self.names[name]] += np.float32(scale) * (x @ A.T @ B.T)
        return y


class DeltaLayer:
    """What both mixers do after their projections; they differ in `project` alone.

    project_in  Projection to q | k | v | z | b | a (GatedDeltaNet) or q | k | v | b | f_a | g_a (KimiDeltaAttention)
    conv        (conv_channels, conv_width), channels q | k | v;  conv_bias (conv_channels,) or None
    A           (H_v,) -exp(A_log);  dt_bias (H_v,), or (H_v * S_k,) for KDA
    norm        (S_v,)
    project_out Projection of (H_v * S_v) values
    lora        LoRA pairs used by calls that give none

    Arrays are float32 and kept, not copied.
    """

    def __init__(self, config, project_in, conv, conv_bias, A, dt_bias, norm, project_out, lora=None):
        self.config, self.project_in, self.project_out = config, project_in, project_out
        self.conv, self.conv_bias, self.A, self.dt_bias, self.norm = conv, conv_bias, A, dt_bias, norm
        self.head_map = None if config.H_k == config.H_v else config.head_map
        key, value = config.H_k * config.S_k, config.H_v * config.S_v
        self.q, self.k, self.v = slice(key), slice(key, 2 * key), slice(2 * key, 2 * key + value)
        self.lora = self._lora(lora)

    def __call__(self, x, batch, step, il, *, mode="auto", n_threads=None, trace=None, lora=None):
        """Mix the tokens of a batch: x (n_tokens, n_embd) float32 -> (n_tokens, n_embd) float32, a new array.

        batch   the Batch of x's rows;  step what `ring.begin(batch)` gave;  il the ring's layer, advanced in place
        mode    of `gated_delta_net`
        trace   a dict that receives copies of what every step made, token-major in the batch's order, rows of padding
                zero: qkv_mixed, conv_output_silu (n, C); q, k after the L2 norm (n, H_k, S_k); v, z, attn_output,
                attn_out_norm (n, H_v, S_v); b (logits), beta (n, H_v); a, gate (n, H_v), KDA (n, H_v, S_k);
                linear_attn_out (n, n_embd)
        lora    {projection: [(A (rank, n_in), B (n_out, rank), scale), ...]}: y += scale * B(A x).  Projections go by
                the names they were loaded under, or q, k, v, qkv, z, b, a, out (KDA: f_a, f_b, g_a, g_b for z and a)

        Raises ValueError (shapes, a step of another batch or ring) and TypeError (anything but float32) before
        anything is written, IndexError for a layer outside the ring.
        """
        c, ring = self.config, self._ring(step, batch)
        x, lora = batch.gather(self._input(x, batch)), self.lora if lora is None else self._lora(lora)
        note = _Trace(trace, batch)
        rows = {"rows_in": step.rows_in, "rows_out": step.rows_out, "cu_seqlens": batch.cu_seqlens,
                "n_threads": n_threads}

        qkv, z, b, a = self.project(x, lora)
        note(qkv_mixed=qkv, z=z, b=b, a=a)
        causal_conv1d_inplace(qkv[None], self.conv, self.conv_bias, ring.conv(il), out=qkv[None], **rows)
        q, k, v = self.split(qkv)
        g = decay_gate(a[None], self.A, self.dt_bias, lower_bound=c.lower_bound, out=a[None], n_threads=n_threads)
        beta = b if c.beta_factor == 1 else c.beta_factor * sigmoid(b)
        note(conv_output_silu=qkv, v=v, gate=a)
        if trace is not None:
            note(q=l2_norm(q, c.l2_eps, form=c.l2_form), k=l2_norm(k, c.l2_eps, form=c.l2_form),
                 beta=sigmoid(b) * np.float32(c.beta_factor))
        o = gated_delta_net_inplace(
            q[None], k[None], v[None], g, beta[None], ring.ssm(il), head_map=self.head_map, mode=mode, qk_l2norm=True,
            l2_eps=c.l2_eps, l2_form=c.l2_form, beta_logit=c.beta_factor == 1, **rows)[0]
        note(attn_output=o)
        rms_norm_gated(o, z, self.norm, c.eps, activation=c.activation, out=o, n_threads=n_threads)
        note(attn_out_norm=o)
        y = self.project_out(o.reshape(len(x), c.H_v * c.S_v), lora)
        note(linear_attn_out=y)
        return batch.scatter(y)

    def split(self, qkv):
        """Views: q, k (n, H_k, S_k) and v (n, H_v, S_v) of the convolution's channels."""
        c, n = self.config, len(qkv)
        return (qkv[:, self.q].reshape(n, c.H_k, c.S_k), qkv[:, self.k].reshape(n, c.H_k, c.S_k),
                qkv[:, self.v].reshape(n, c.H_v, c.S_v))

    def _input(self, x, batch):
        x = x.numpy()[0, 0] if isinstance(x, Tensor) and x.ne[2] == x.ne[3] == 1 else np.asarray(x)
        if x.dtype != np.float32:
            raise TypeError(f"x must be float32, got {x.dtype}")
        if x.shape != (batch.n_tokens, self.config.n_embd):
            raise ValueError(f"x must have shape (n_tokens, n_embd) = ({batch.n_tokens}, {self.config.n_embd}), "
                             f"got {x.shape}")
        return x

    def _ring(self, step, batch):
        """The step's ring, if step, batch and layer go together."""
        if not (np.array_equal(step.seq_ids, batch.unique_ids) and np.array_equal(step.n_tokens, batch.lengths)):
            raise ValueError(f"the step is of sequences {step.seq_ids} with {step.n_tokens} tokens, the batch of "
                             f"{batch.unique_ids} with {batch.lengths}")
        ring, need = step.ring, self.config.ring_extents
        have = {name: getattr(ring, name) for name in need}
        if have != need:
            raise ValueError(f"the ring's rows are of {have}, the layer's of {need}")
        return ring

    @property
    def _projections(self):
        return self.project_in, self.project_out

    def _lora(self, lora):
        """LoRA pairs as float32 arrays of the right shapes."""
        if not lora:
            return None
        owners = {name: p for p in self._projections for name in p.names}
        if unknown := lora.keys() - owners.keys():
            raise ValueError(f"lora names no projection of this layer: {sorted(unknown)}; there are {sorted(owners)}")
        return {name: [_lora_pair(owners[name], name, *pair) for pair in pairs] for name, pairs in lora.items()}


class GatedDeltaNet(DeltaLayer):
    """One Gated DeltaNet mixer (arXiv 2412.06464), loaded by `from_state_dict` or `from_gguf`."""

    def project(self, x, lora):
        """Views of one matrix product: qkv (n, C), z (n, H_v, S_v), b and a (n, H_v)."""
        c, y = self.config, self.project_in(x, lora)
        C, D = c.conv_channels, c.conv_channels + c.H_v * c.S_v
        return y[:, :C], y[:, C:D].reshape(len(x), c.H_v, c.S_v), y[:, D:D + c.H_v], y[:, D + c.H_v:]

    @classmethod
    def from_state_dict(cls, weights, prefix, config, *, lora=None):
        """A layer from transformers' weights (qwen3_next, qwen3_5 and its relatives, olmo_hybrid).

        weights  a mapping of names to arrays: numpy, torch, or what safetensors loads; read as float32
        prefix   like "model.layers.1.linear_attn."
        config   a mapping or object with transformers' field names, model_type among them

        Raises ValueError naming a missing, mis-shaped or unknown tensor and what was expected.
        """
        from gdn.adapters import transformers
        return cls(*transformers.gated_delta_net(weights, prefix, config), lora=lora)

    @classmethod
    def from_gguf(cls, path, block, *, lora=None):
        """Block `block` of a GGUF file (qwen3next, qwen35, qwen35moe), any tensor type the gguf package can read.

        Raises ValueError for a file that is no GGUF, is truncated or contradicts itself, and for missing or mis-shaped
        tensors; IndexError for a block outside the file.
        """
        from gdn.adapters import gguf
        return cls(*gguf.gated_delta_net(path, block), lora=lora)


class KimiDeltaAttention(DeltaLayer):
    """One Kimi Delta Attention mixer (arXiv 2510.26692), loaded by `from_state_dict` or `from_gguf`.

    gate_a  Projection from f_a's outputs to the decay's channels;  gate_z from g_a's to the output gate's
    """

    def __init__(self, config, project_in, gate_a, gate_z, *weights, lora=None):
        self.gate_a, self.gate_z = gate_a, gate_z
        super().__init__(config, project_in, *weights, lora=lora)

    def project(self, x, lora):
        """Three matrix products: qkv (n, C), z (n, H, S_v), b (n, H), a (n, H, S_k)."""
        c, y = self.config, self.project_in(x, lora)
        C, r = c.conv_channels, self.gate_a.weight.shape[1]
        b, f, g = y[:, C:C + c.H_v], y[:, C + c.H_v:C + c.H_v + r], y[:, C + c.H_v + r:]
        z, a = self.gate_z(g, lora), self.gate_a(f, lora)
        return y[:, :C], z.reshape(len(x), c.H_v, c.S_v), b, a.reshape(len(x), c.H_v, c.S_k)

    @property
    def _projections(self):
        return self.project_in, self.gate_a, self.gate_z, self.project_out

    @classmethod
    def from_state_dict(cls, weights, prefix, config, *, lora=None):
        """As GatedDeltaNet.from_state_dict, for kimi_linear: released names and run-time names."""
        from gdn.adapters import transformers
        return cls(*transformers.kimi_delta_attention(weights, prefix, config), lora=lora)

    @classmethod
    def from_gguf(cls, path, block, *, lora=None):
        """As GatedDeltaNet.from_gguf, for kimi-linear."""
        from gdn.adapters import gguf
        return cls(*gguf.kimi_delta_attention(path, block), lora=lora)


class _Trace:
    """Copies what it is told into a dict, in the batch's order; does nothing without a dict."""

    def __init__(self, trace, batch):
        self.trace, self.batch = trace, batch

    def __call__(self, **values):
        if self.trace is not None:
            self.trace.update({name: self.batch.scatter(value.copy()) for name, value in values.items()})


def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow, accurate on both sides."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, np.float32(1), e) / (1 + e)


def _lora_pair(projection, name, A, B, scale):
    A, B = np.asarray(A, np.float32), np.asarray(B, np.float32)
    n_out, n_in = np.empty(len(projection.weight), bool)[projection.names[name]].size, projection.weight.shape[1]
    if A.ndim != 2 or A.shape[1] != n_in or B.shape != (n_out, len(A)):
        raise ValueError(f"lora of {name}: A must be (rank, {n_in}) and B ({n_out}, rank), got {A.shape} and {B.shape}")
    return A, B, scale
