"""Shakespeare, byte by byte: a small language model whose every mixing layer is Gated DeltaNet.

The whole model is on this page: numpy does the matrix products, gdn everything that carries a state.  A model with
softmax attention would keep a key and a value for every token it has read; this one keeps, for each layer, a state of
fixed size that is updated in place.

    python examples/shakespeare/generate.py --prompt "ROMEO." --tokens 300 --temperature 0.7 --seed 1
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

import gdn

FILE = Path(__file__).with_name("shakespeare.gguf")
Array = NDArray[Any]
PROMPT = "HAMLET.\nTo be, or not to be, that is the question:\n"


def silu(x: Array) -> Array:
    y: Array = x / (1 + np.exp(-x))
    return y


class Model:
    """The weights of a GGUF file and the state of one conversation."""

    def __init__(self, path: str | Path = FILE, state_type: str = "f32") -> None:
        reader = GGUFReader(path)
        config = {name.split(".", 1)[1]: field.contents() for name, field in reader.fields.items() if "." in name}
        self.weights = {t.name: np.asarray(dequantize(t.data, t.tensor_type), np.float32) for t in reader.tensors}
        self.n_layers = config["block_count"]
        self.eps = config["attention.layer_norm_rms_epsilon"]
        self.H_k, self.H_v = config["ssm.group_count"], config["ssm.time_step_rank"]
        self.S_k, self.S_v = config["ssm.state_size"], config["ssm.inner_size"] // self.H_v
        channels = 2 * self.H_k * self.S_k + self.H_v * self.S_v
        # One row a sequence; this program reads a single one, so every cache has one row.
        shape = self.n_layers, 1, self.H_v, self.S_v, self.S_k
        self.states: Any = np.zeros(shape, np.float16 if state_type == "f16" else np.float32)
        if state_type == "bf16":                       # numpy has none: a view of 16-bit words a layer
            self.states = [gdn.Tensor(words, type="bf16") for words in np.zeros(shape, np.uint16)]
        self.windows = np.zeros((self.n_layers, 1, channels, config["ssm.conv_kernel"] - 1), np.float32)

    def rms_norm(self, x: Array, name: str) -> Array:
        y: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.weights[name]
        return y

    def delta_net(self, x: Array, layer: int) -> Array:
        """The mixing layer: x (n_tokens, n_embd) -> the same, reading and advancing the layer's state."""
        n = len(x)

        def w(name: str) -> Array:
            return self.weights[f"blk.{layer}.{name}"]

        qkv = x @ w("attn_qkv.weight").T
        z = (x @ w("attn_gate.weight").T).reshape(1, n, self.H_v, self.S_v)
        beta = (x @ w("ssm_beta.weight").T).reshape(1, n, self.H_v)
        g = gdn.decay_gate((x @ w("ssm_alpha.weight").T).reshape(1, n, self.H_v), w("ssm_a"), w("ssm_dt.bias"))
        qkv = gdn.causal_conv1d_inplace(qkv[None], w("ssm_conv1d.weight"), None, self.windows[layer], [0])
        q, k, v = np.split(qkv, [self.H_k * self.S_k, 2 * self.H_k * self.S_k], axis=-1)         # views, not copies
        out = gdn.gated_delta_net_inplace(
            q.reshape(1, n, self.H_k, self.S_k), k.reshape(1, n, self.H_k, self.S_k),
            v.reshape(1, n, self.H_v, self.S_v), g, beta, self.states[layer], [0], head_map="tiled",
            qk_l2norm=True, beta_logit=True, mode="chunked" if n > 1 else "recurrent")
        out = gdn.rms_norm_gated(out, z, w("ssm_norm.weight"), self.eps)
        return out.reshape(n, -1) @ w("ssm_out.weight").T

    def feed_forward(self, x: Array, layer: int) -> Array:
        gate, up, down = (self.weights[f"blk.{layer}.ffn_{part}.weight"].T for part in ("gate", "up", "down"))
        return (silu(x @ gate) * (x @ up)) @ down

    def __call__(self, tokens: list[int]) -> Array:
        """Read some tokens; the logits (n_tokens, 256) of what comes after each of them."""
        x = self.weights["token_embd.weight"][tokens]
        for layer in range(self.n_layers):
            x = x + self.delta_net(self.rms_norm(x, f"blk.{layer}.attn_norm.weight"), layer)
            x = x + self.feed_forward(self.rms_norm(x, f"blk.{layer}.post_attention_norm.weight"), layer)
        return self.rms_norm(x, "output_norm.weight") @ self.weights["token_embd.weight"].T


def pick(logits: Array, temperature: float, rng: np.random.Generator) -> int:
    """The next byte: the likeliest at temperature 0, else drawn from softmax(logits / temperature)."""
    if temperature == 0:
        return int(logits.argmax())
    noise = rng.gumbel(size=logits.shape)              # argmax of logits + Gumbel noise is a draw from softmax
    return int((logits / temperature + noise).argmax())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=500, help="how many bytes to write")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--greedy", action="store_true", help="always the likeliest byte")
    parser.add_argument("--state-type", choices=("f32", "bf16", "f16"), default="f32", help="how states are stored")
    parser.add_argument("--file", default=FILE, help="a GGUF file of this form")
    args = parser.parse_args()
    if not args.prompt or args.tokens < 0 or args.temperature < 0:
        parser.error("a prompt of at least one byte, and no negative numbers, please")
    return args


def main() -> None:
    args = arguments()
    gdn.set_num_threads(1)                             # four heads of 64: too little work to share
    temperature, rng = 0 if args.greedy else args.temperature, np.random.default_rng(args.seed)
    model, prompt = Model(args.file, args.state_type), list(args.prompt.encode())

    def write(data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    write(bytes(prompt))
    start = time.perf_counter()
    logits = model(prompt)[-1]                         # prefill: the whole prompt in one chunked call a layer
    middle = time.perf_counter()
    for _ in range(args.tokens):                       # decode: token by token, the states updated in place
        token = pick(logits, temperature, rng)
        write(bytes([token]))
        logits = model([token])[-1]
    end = time.perf_counter()
    print(f"\n\nprefill {len(prompt)} tokens, {len(prompt) / (middle - start):.0f} tokens/s;  "
          f"decode {args.tokens} tokens, {args.tokens / (end - middle):.0f} tokens/s;  "
          f"state {(sum(x.nbytes for x in model.states) + model.windows.nbytes) / 1024:.0f} KiB whatever the length")


if __name__ == "__main__":
    main()
