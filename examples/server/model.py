"""The shakespeare model for many sequences at once: every layer runs one packed batch over the ring."""

from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

import gdn

FILE = Path(__file__).parents[1] / "shakespeare" / "shakespeare.gguf"
N_VOCAB = 256                # a token is a byte
END = 0                      # tokenizer.ggml.eos_token_id


def silu(x):
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


class Model:
    """The weights; the states are in the ring of whoever calls."""

    def __init__(self, path=FILE):
        reader = GGUFReader(path)
        config = {name.split(".", 1)[1]: field.contents() for name, field in reader.fields.items() if "." in name}
        mixing = ("attn_qkv", "attn_gate", "ssm_")
        self.weights = {t.name: np.asarray(dequantize(t.data, t.tensor_type), np.float32) for t in reader.tensors
                        if not any(part in t.name for part in mixing)}
        # Transposed in memory: BLAS multiplies few rows by such a matrix in half the time.
        self.columns = {name: np.ascontiguousarray(w.T) for name, w in self.weights.items() if w.ndim == 2}
        self.eps = np.float32(config["attention.layer_norm_rms_epsilon"])
        self.layers = [gdn.GatedDeltaNet.from_gguf(path, block=i) for i in range(config["block_count"])]

    def rms_norm(self, x, name):
        mean = np.einsum("ij,ij->i", x, x)[:, None] / np.float32(x.shape[1])
        return x / np.sqrt(mean + self.eps) * self.weights[name]

    def feed_forward(self, x, il):
        gate, up, down = (self.columns[f"blk.{il}.ffn_{part}.weight"] for part in ("gate", "up", "down"))
        return (silu(x @ gate) * (x @ up)) @ down

    def __call__(self, tokens, batch, step, rows):
        """Logits (len(rows), 256) of what follows the tokens at `rows`; tokens (n,) of `batch`, step from ring.begin."""
        x = self.weights["token_embd.weight"][tokens]
        for il, layer in enumerate(self.layers):
            x = x + layer(self.rms_norm(x, f"blk.{il}.attn_norm.weight"), batch, step, il)
            x = x + self.feed_forward(self.rms_norm(x, f"blk.{il}.post_attention_norm.weight"), il)
        return self.rms_norm(x[rows], "output_norm.weight") @ self.columns["token_embd.weight"]
