"""A layer's configuration: what it refuses, its tag, what may be said over a model's."""

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, replace

import numpy as np
import pytest

import gdn

CONFIG = gdn.LayerConfig(kind="kda", n_embd=16, H_k=2, H_v=6, S_k=8, S_v=12, width=4, head_map="tiled", norm_eps=1e-5,
                         activation="sigmoid", family="kimi_linear")
EXTENTS = ("n_embd", "H_k", "H_v", "S_k", "S_v", "width")


@pytest.mark.parametrize("bad", [
    {"kind": "gla"}, {"head_map": "none"}, {"head_map": None}, {"l2_form": "mean"}, {"activation": "relu"}, {"gate": "exp"},
    {"gate": None}, {"H_k": 4}, {"family": 5},
    *({name: x} for name in EXTENTS for x in (0, -1, 2.0, "2", [2], True, None)),
    *({name: x} for name in ("f_rank", "g_rank") for x in (0, -1, 2.0, "2", True)),
    *({name: x} for name in ("norm_eps", "l2_eps", "beta_factor", "output_gate_factor", "norm_offset")
      for x in (np.nan, np.inf, 1e39, "1", [1], True, None)),
    {"norm_eps": -1e-6}, {"l2_eps": -1e-6}, {"beta_factor": 0}, {"beta_factor": -1}, {"output_gate_factor": 0}], ids=str)
def test_a_value_that_no_layer_has_is_refused(bad):
    with pytest.raises(ValueError, match="config: " + next(iter(bad)).replace("H_k", "H_")):
        replace(CONFIG, **bad)


def test_the_gate_is_named_never_inferred():
    for bound in (-5.0, 0, 5.0):
        with pytest.raises(ValueError, match="config: lower_bound is .*softplus"):
            replace(CONFIG, lower_bound=bound)
    for gate in ("bounded", "clamped"):
        assert replace(CONFIG, gate=gate, lower_bound=-5).lower_bound == -5.0
        with pytest.raises(ValueError, match="needs a lower_bound"):
            replace(CONFIG, gate=gate)
        for bound in (0, -0.0, 5.0, np.nan, -np.inf, "-5", True):
            with pytest.raises(ValueError, match="config: lower_bound"):
                replace(CONFIG, gate=gate, lower_bound=bound)


def test_a_config_is_frozen_and_kept_by_copies():
    with pytest.raises(FrozenInstanceError):
        CONFIG.H_k = 3
    assert pickle.loads(pickle.dumps(CONFIG)) == CONFIG == gdn.LayerConfig(**asdict(CONFIG))
    assert hash(CONFIG) == hash(replace(CONFIG, projections={"a": "b"}))
    names = {"q_proj": "q"}
    config = replace(CONFIG, projections=names)
    names["k_proj"] = "k"
    assert config.projections == {"q_proj": "q"}
    with pytest.raises(TypeError, match="missing .*'kind'"):
        gdn.LayerConfig()
    with pytest.raises(TypeError, match="unexpected .*'lower_bounds'"):
        replace(CONFIG, lower_bounds=-5)


def test_the_tag_says_family_head_order_and_extents():
    tags = {replace(CONFIG, **{name: value}).tag for name, value in (
        ("family", "glm5_next"), ("head_map", "interleaved"), ("H_k", 3), ("H_v", 8), ("S_k", 9), ("S_v", 13), ("width", 5),
        ("kind", "gdn"), ("norm_eps", 1e-5))}
    assert len(tags) == 9 and CONFIG.tag in tags and all(0 < tag < 2**63 for tag in tags)
    for same in ({"norm_eps": 1}, {"n_embd": 3}, {"gate": "bounded", "lower_bound": -1}, {"projections": {"q": "k"}}):
        assert replace(CONFIG, **same).tag == CONFIG.tag
    for heads in ({"H_k": 1}, {"H_k": 6}):           # one order of heads is the other's
        assert replace(CONFIG, **heads).tag == replace(CONFIG, **heads, head_map="interleaved").tag


def test_the_tag_is_the_same_in_every_process_and_version():
    assert CONFIG.tag == TAG
    code = f"import gdn; print(gdn.LayerConfig(**{asdict(CONFIG)!r}).tag)"
    assert int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout) == TAG


TAG = 1674700394451461802


def test_overrides_are_checked_as_any_config():
    assert CONFIG.override(None) is CONFIG
    assert CONFIG.override({"gate": "bounded", "lower_bound": -5.0}) == replace(CONFIG, gate="bounded", lower_bound=-5.0)
    for wrong in ("n_embd", "H_k", "kind", "f_rank", "family", "projections", "gate_lower_bound", "override"):
        with pytest.raises(ValueError, match=f"overrides: {wrong} cannot be said, only .*gate, lower_bound"):
            CONFIG.override({wrong: 1})
    for bad, message in (({"gate": "bounded"}, "needs a lower_bound"), ({"lower_bound": -5.0}, "softplus"),
                         ({"beta_factor": 0}, "beta_factor must be positive")):
        with pytest.raises(ValueError, match=message):
            CONFIG.override(bad)
    with pytest.raises(TypeError, match="overrides must be a mapping"):
        CONFIG.override([("gate", "bounded")])
