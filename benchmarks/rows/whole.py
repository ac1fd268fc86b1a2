"""Rows of whole layers against transformers' own, and of whole models of transformers with gdn installed against without."""

from benchmarks import layers, models
from benchmarks.pairs import compare
from benchmarks.rows.table import row, times


def layer_rows(family):
    def over_transformers(n_tokens):
        theirs, our = layers.both_calls(family, n_tokens, 1)
        p = compare(theirs, our, least_pairs=3)
        return p.ratio, times(p)

    @row(f"layer-prefill-{family}", f"{family} layer, n_embd 2048, 512 tokens, over transformers' layer", target=1,
         at_least=True)
    def _():
        return over_transformers(512)

    @row(f"layer-decode-{family}", f"{family} layer, a decode step, over transformers' layer", target=1, at_least=True)
    def _():
        return over_transformers(1)

    @row(f"layer-beside-{family}", f"{family} layer: time outside the matmuls over the kernels' own, one token and 512, "
         "the worse", target=1.25, at_least=False)
    def _():
        layer, results, details = layers.our_layer(*layers.module(family)), [], {}
        for n_tokens in (1, 512):
            outside, kernels = layers.beside(layer, n_tokens)
            results.append(outside / kernels)
            details |= {f"{n_tokens} tok": round(outside / kernels, 3), f"a_us {n_tokens}": round(outside * 1e6, 1),
                        f"b_us {n_tokens}": round(kernels * 1e6, 1)}
        return max(results), details


for _family in layers.FAMILIES:
    layer_rows(_family)


# Whole models of transformers -----------------------------------------------------------------------------------------

def model_row(family, dtype, what, target, stretch=None):
    short = "" if dtype == "float32" else "-bf16"
    of = "prefill of 1024 tokens" if what == "prefill" else "decode step"

    @row(f"model-{what}-{family}{short}", f"{family} model, {dtype}, {of}: transformers' time over that with gdn installed",
         target=target, stretch=stretch, at_least=True)
    def _():
        p, bound = models.ratio(family, dtype, what)
        return p.ratio, times(p, ratio_of_free_layers=round(bound, 2))


for _row in (("qwen3_5", "float32", "prefill", 1.65, 1.75), ("qwen3_5", "float32", "step", 1.10, 1.15),
             ("qwen3_5", "bfloat16", "prefill", 1.08), ("qwen3_5", "bfloat16", "step", 1.04),
             ("kimi_linear", "float32", "prefill", 12, 13), ("kimi_linear", "float32", "step", 1),
             ("kimi_linear", "bfloat16", "prefill", 2.9), ("kimi_linear", "bfloat16", "step", 1)):
    model_row(*_row)


@row("model-share-qwen3_5", "qwen3_5 model, float32, prefill: time that is neither matmul, MLP nor full attention, gdn installed "
     "over transformers alone", target=0.2, stretch=0.15, at_least=False)
def _():
    stock, installed, value = models.share("qwen3_5", "float32")
    return value, {"stock_ms": round(stock * 1e3), "installed_ms": round(installed * 1e3)}
