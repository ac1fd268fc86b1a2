"""Every architecture's whole tiny model run by llama.cpp itself, its linear-attention layers against ours: the hidden
states that went into each, taken from its graph, give what came out of it."""

import gguf_models as models
import numpy as np
import pytest
from helpers import assert_close

import gdn
from gdn.adapters.gguf import STATELESS

ARCHS = (*models.GDN_ARCHS, *models.KDA_ARCHS)
LINEAR = range(models.N_BLOCKS - 1)
INPUTS = {"qwen4exp": "hc_mixed"}
BOUND = 1e-4
CASES = [
    *((arch, {}) for arch in ARCHS if arch != "bailingmoe3"),
    *((arch, {"bound": -5.0}) for arch in ("glm5-next", "bailingmoe3", "kimi-k3")),
    ("kimi-linear", {"fused": True, "eps": 1e-3}), ("qwen3next", {"fused": True}), ("qwen35", {"eps": 1e-3, "H_v": 6}),
    ("glm5-next", {"eps": 1e-3}),
]


def layer_class(arch):
    return gdn.KimiDeltaAttention if arch in models.KDA_ARCHS else gdn.GatedDeltaNet


def run_llama(llama, path, arch, calls):
    """{block: [(hidden states in, out) of every call]}, rows in the order in which llama.cpp took the tokens."""
    into, outs = INPUTS.get(arch, "attn_norm"), ("linear_attn_out", "kda_out", "prefix_sum_attn")
    watch = {f"{name}-{il}" for name in (into, *outs) for il in LINEAR}
    context = llama.model(path).context(watch, n_seq_max=4, embeddings=arch == "clef")
    for tokens, seq_id in calls:
        context.decode(tokens, seq_id=seq_id)
    found = {}
    for il in LINEAR:
        # A node is called by its last name: kimi-k3's output is the residual stream itself where that starts anew.
        y = next(context.seen[f"{out}-{il}"] for out in outs if context.seen[f"{out}-{il}"])
        x = context.seen[f"{into}-{il}"]
        x = x[::2] if arch in INPUTS else x                       # of its two mixers of a block the first
        assert len(x) == len(y) == len(calls)
        found[il] = [(a.reshape(-1, models.E), b.reshape(-1, models.E)) for a, b in zip(x, y, strict=True)]
    return found


def compare(llama, path, arch, calls, overrides=None):
    """Our layers on what llama.cpp's got, call by call."""
    for il, pairs in run_llama(llama, path, arch, calls).items():
        layer = layer_class(arch).from_gguf(path, il, overrides=overrides)
        ring = gdn.StateRing.create(2, n_layers=1, **layer.extents)
        for seq_id in (0, 1):
            ring.acquire(seq_id)
        for (x, y), (tokens, seq_id) in zip(pairs, calls, strict=True):
            batch = gdn.Batch(np.broadcast_to(seq_id, len(tokens)))
            with ring.begin(batch) as step:
                assert_close(layer(np.ascontiguousarray(x), batch, step, 0), y, f"{arch}, block {il}", BOUND)


def check(llama, tmp_path, arch, rng, overrides=None, **options):
    path = models.write(tmp_path / "model.gguf", arch, *models.model(arch, rng, **options))
    tokens = rng.integers(0, models.N_VOCAB, 80)
    calls = [(tokens[:40], 0)]
    if arch not in STATELESS:
        # It goes on; two sequences of a token each, and of three each, taken sequence by sequence.
        calls += [(tokens[40:45], 0), (tokens[45:46], 0), (tokens[46:47], 1), (tokens[47:49], [0, 1]),
                  (tokens[49:55], [0, 0, 0, 1, 1, 1])]
    compare(llama, path, arch, calls, overrides)


@pytest.mark.parametrize("arch, options", CASES, ids=[f"{arch}-{'-'.join(map(str, options))}" for arch, options in CASES])
def test_layers_give_what_llama_gives(llama, tmp_path, rng, arch, options):
    check(llama, tmp_path, arch, rng, **options)


def test_kimi_linears_bound_is_not_read(llama, tmp_path, rng):
    """As llama.cpp has it, a bound in such a file changes nothing; ours asks what is meant."""
    check(llama, tmp_path, "kimi-linear", rng, overrides={"gate": "softplus"}, bound=-5.0)
    with pytest.raises(ValueError, match=r"kimi-linear\.kda\.gate_lower_bound is -5\.0"):
        gdn.KimiDeltaAttention.from_gguf(tmp_path / "model.gguf", 0)


def test_a_split_model(llama, tmp_path, rng):
    meta, tensors = models.model("glm5-next", rng)
    whole = models.write(tmp_path / "x.gguf", "glm5-next", meta, tensors)
    models.write(tmp_path / "split.gguf", "glm5-next", meta, tensors, split_max_tensors=30)
    first = min(tmp_path.glob("split-*"))
    logits = [llama.model(path).context().decode(range(20)) for path in (first, whole)]
    np.testing.assert_array_equal(*logits)
    compare(llama, first, "glm5-next", [(np.arange(20), 0)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("arch", ARCHS)
def test_random_sizes(llama, tmp_path, arch, seed):
    rng = np.random.default_rng([seed, *arch.encode()])
    H_k, ratio = int(rng.integers(1, 4)), int(rng.integers(1, 9))
    options = {"H_k": H_k, "H_v": H_k * ratio, "S": int(rng.choice([16, 32, 64, 128])), "width": int(rng.integers(2, 5)),
               "eps": float(rng.choice([1e-6, 1e-5, 1e-3]))}
    if arch in models.KDA_ARCHS:
        options["H_v"] = ratio
        if arch == "bailingmoe3" or arch != "kimi-linear" and rng.random() < 0.5:
            options["bound"] = float(rng.choice([-5.0, -0.5, -20.0]))
    if arch in ("kimi-linear", "qwen3next"):
        options["fused"] = bool(rng.integers(2))
    check(llama, tmp_path, arch, rng, **options)
