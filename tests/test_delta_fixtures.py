"""Recorded layers of Qwen3-Next, Qwen3.5, Kimi-Linear and OLMo-Hybrid: q, k, v, g, beta in, core and states out."""

import numpy as np
import pytest
from helpers import DATA, assert_close

import gdn

FAMILIES = ("qwen3next", "qwen35", "kimi", "olmo")


def load(family):
    z = np.load(DATA / f"{family}.npz")
    H_k, S_k = z["q_l2"].shape[2:]
    v = z["conv_out"][..., 2 * H_k * S_k:].reshape(z["core"].shape)
    return z, {"q": z["q_l2"], "k": z["k_l2"], "v": v, "g": z["g"], "beta": z["beta"]}


def tokens(c, start, stop):
    return {n: x[:, start:stop] for n, x in c.items()}


@pytest.mark.parametrize("mode", ["auto", "recurrent", "chunked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode(family, mode):
    z, c = load(family)
    out, state = gdn.gated_delta_net(**tokens(c, 0, 70), head_map="interleaved", mode=mode)
    assert_close(out, z["core"][:, :70], "prefill core")
    assert_close(state.swapaxes(-1, -2), z["state_prefill"], "prefill state")
    for t in range(70, 75):
        out, _ = gdn.gated_delta_net(**tokens(c, t, t + 1), state=state, state_out=state, head_map="interleaved")
        assert_close(out, z["core"][:, t:t + 1], f"core of token {t}")
    assert_close(state.swapaxes(-1, -2), z["state_final"], "final state")


@pytest.mark.parametrize("family", FAMILIES)
def test_their_state_memory_is_used_as_it_is(family):
    """[key][value] states of the recording, as a cache that is updated through a view."""
    z, c = load(family)
    cache = np.full((3, *z["state_prefill"].shape[1:]), np.nan, np.float32)
    cache[1] = z["state_prefill"][0]
    for t in range(70, 75):
        out = gdn.gated_delta_net_inplace(**tokens(c, t, t + 1), cache=cache.swapaxes(-1, -2), rows_in=[1],
                                          head_map="interleaved")
        assert_close(out, z["core"][:, t:t + 1], f"core of token {t}")
    assert_close(cache[1:2], z["state_final"], "final state")
    assert np.isnan(cache[[0, 2]]).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_normalisation_and_sigmoid_inside(family):
    """Raw q, k from the convolution and beta's logit, as serving code has them."""
    z, c = load(family)
    H_k, S_k = z["q_l2"].shape[2:]
    raw = [z["conv_out"][..., i * H_k * S_k:(i + 1) * H_k * S_k].reshape(z["q_l2"].shape) for i in (0, 1)]
    logit = np.log(c["beta"]) - np.log1p(-c["beta"]) if family == "qwen3next" else z["b"].reshape(c["beta"].shape)
    factor = 2 if family == "olmo" else 1         # beta = factor * sigmoid(logit) can only be asked for with factor 1
    options = {"beta": logit, "beta_logit": True} if factor == 1 else {"beta": c["beta"]}
    out, state = gdn.gated_delta_net(**{**c, "q": raw[0], "k": raw[1], **options}, qk_l2norm=True, l2_eps=1e-6,
                                     head_map="interleaved")
    assert_close(out, z["core"], "core")
    assert_close(state.swapaxes(-1, -2), z["state_final"], "state")


@pytest.mark.parametrize("family", ["qwen3next", "qwen35"])
def test_the_other_head_map_is_another_result(family):
    z, c = load(family)
    out, _ = gdn.gated_delta_net(**c, head_map="tiled")
    assert np.abs(out - z["core"]).max() > 0.1 * np.abs(z["core"]).max()
