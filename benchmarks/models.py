"""Whole random models of transformers at real head extents, stock and with gdn installed, on one thread.

Hidden size 1024, four linear layers and a full one, dense MLPs in the proportion of the class's own defaults, 1024 tokens.
"""

import contextlib
import importlib
import time

import numpy as np

import gdn
from benchmarks.check import expect
from benchmarks.pairs import compare

HIDDEN, N_LINEAR, N_TOKENS = 1024, 4, 1024
HEADS = {"num_attention_heads": 8, "head_dim": 128}
FAMILIES = {        # transformers' folder: config, model, intermediate size, the heads' extents
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", 3 * HIDDEN,
                {"num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                 "linear_key_head_dim": 128, "linear_value_head_dim": 128}),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", 4 * HIDDEN,
                    {"num_key_value_heads": 8, "linear_num_heads": 32, "linear_head_dim": 128, "kv_lora_rank": 256,
                     "mlp_layer_types": ["dense"] * (N_LINEAR + 1)}),
}
BOUND = {"float32": 1e-3, "bfloat16": 0.3}        # of the largest logit; in bfloat16 the two round at different places


class Model:
    """A model, its calls, and the seconds that it spends outside matmuls, MLPs and full attention."""

    def __init__(self, family, dtype):
        import torch

        import gdn.adapters.transformers as adapter
        self.torch, self.adapter, self.family, self.dtype = torch, adapter, family, dtype
        torch.set_num_threads(1)
        gdn.set_num_threads(1)
        config_name, model_name, intermediate, extents = FAMILIES[family]
        code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        config = getattr(code, config_name)(
            hidden_size=HIDDEN, intermediate_size=intermediate, num_hidden_layers=N_LINEAR + 1, vocab_size=1024,
            layer_types=["linear_attention"] * N_LINEAR + ["full_attention"], pad_token_id=0, bos_token_id=1, eos_token_id=2,
            **HEADS, **extents)
        torch.manual_seed(0)
        self.model = getattr(code, model_name)(config).eval()
        for name, p in self.model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                torch.nn.init.uniform_(p, -1, 1)
        self.model = self.model.to(getattr(torch, dtype))
        self.ids = torch.randint(3, 1000, (1, N_TOKENS))
        with torch.no_grad():
            self.cache = self.model(self.ids[:, :128], use_cache=True).cache

    def prefill(self):
        return self.model(self.ids, use_cache=True, logits_to_keep=1).logits

    def step(self):
        return self.model(self.ids[:, :1], cache=self.cache, use_cache=True).logits

    def pair(self, what):
        """(stock, installed), whose prefills agree."""
        theirs, ours = (Call(self, "prefill", installed).result().float().numpy() for installed in (False, True))
        expect(f"{self.family}'s logits", ours, theirs, BOUND[self.dtype])
        return Call(self, what, False), Call(self, what, True)

    def outside(self):
        """Names of the modules that are matmuls, MLPs and full attention, none inside another."""
        names = []
        for name, m in self.model.named_modules():
            attention = name.endswith(".self_attn") and not hasattr(m, "conv1d")
            if (attention or name.endswith(".mlp") or isinstance(m, self.torch.nn.Linear)) and not name.startswith(tuple(names)):
                names.append(name)
        return names

    @contextlib.contextmanager
    def watched(self, layers_alone=False):
        """A list that receives the seconds of every call, or of every linear layer's, less those of `outside`."""
        spent, started, hooks = [], [], []

        def start(module, *_):
            started.append(time.perf_counter())

        def stop(sign):
            return lambda *_: spent.append(sign * (time.perf_counter() - started.pop()))

        whole = [name for name, m in self.model.named_modules() if hasattr(m, "conv1d")] if layers_alone else [""]
        for sign, names in ((1, whole), (-1, self.outside())):
            for module in (self.model.get_submodule(name) for name in names if name.startswith(tuple(whole))):
                hooks += [module.register_forward_pre_hook(start), module.register_forward_hook(stop(sign))]
        yield spent
        for hook in hooks:
            hook.remove()


class Call:
    """A model's prefill or step, stock or with gdn installed; what is installed is so before the clock starts."""

    def __init__(self, model, what, installed):
        self.model, self.run, self.installed = model, getattr(model, what), installed

    @contextlib.contextmanager
    def context(self):
        adapter = self.model.adapter
        with self.model.torch.no_grad(), adapter.installed(self.model.family) if self.installed else contextlib.nullcontext():
            yield

    def result(self):
        with self.context():
            return self.run()

    __call__ = result

    def sample(self, n):
        with self.context():
            start = time.perf_counter()
            for _ in range(n):
                self.run()
            return (time.perf_counter() - start) / n


def ratio(family, dtype, what):
    """(time of stock over installed, the pairs; what the ratio would be if the layers took no time outside their projections)."""
    model = Model(family, dtype)
    stock, installed = model.pair(what)
    pairs = compare(stock, installed, budget=20 if what == "prefill" else 8, least_pairs=3)
    bounds = []
    for _ in range(1 if pairs.a > 10 else 5):
        with model.watched(layers_alone=True) as spent:
            total = stock.sample(1)
        bounds.append(total / (total - sum(spent)))
    return pairs, float(np.median(bounds))


def share(family, dtype):
    """Time outside matmuls, MLPs and full attention of a prefill: installed over stock."""
    model = Model(family, dtype)
    stock, installed = model.pair("prefill")
    with model.watched() as spent:
        def seconds(call):
            spent.clear()
            call()
            return sum(spent)
        pairs = [(seconds(stock), seconds(installed)) for _ in range(5)]
    return tuple(float(np.median(x)) for x in (*zip(*pairs, strict=True), [b / a for a, b in pairs]))
