"""Every instruction-set level this machine runs: chosen by GDN_LEVEL, held to the same bound."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gdn

HERE = Path(__file__).parent
LEVELS = [name for name in ("base", "v3", "v4") if list(Path(gdn.__file__).parent.glob(f"_level_{name}.*.so"))]

# What `python -m gdn check` leaves out: both state orders in every mode, what lies around an output, flags, snapshots.
SMALL = """
import sys
sys.path.insert(0, {here!r})
import numpy as np
from helpers import GATES, Carved, assert_close, case, run, snapshot_truth, truth
rng = np.random.default_rng(0)
flags = [{{}}, dict(qk_l2norm=True), dict(qk_l2norm=True, l2_form="max", beta_logit=True)]
orders = [[0, 1, 2, 3, 4], [0, 1, 2, 4, 3]]
for sizes in ((1, 1), (3, 5), (16, 16), (20, 33), (64, 40), (128, 128)):
    for i, gates in enumerate(GATES):
        n_tokens, H_k, options = (2, 5, 33, 70)[i % 4], rng.integers(1, 3), flags[i % 3]
        c = case(rng, 1 + i % 3, n_tokens, H_k, 2 * H_k, *sizes, gates, bool(i % 2))
        head_map, K = rng.choice(["tiled", "interleaved"]), rng.integers(1, 3)
        expected, _, states = truth(c, head_map, **options)
        kept = snapshot_truth(c, states, K)
        inputs = {{n: Carved(x).array for n, x in c.items()}}
        for order in orders:
            for mode in ("recurrent", "chunked"):
                out, state = Carved(shape=c["v"].shape), Carved(shape=kept.shape, order=order)
                inputs["state"] = Carved(c["state"], order=[j - 1 for j in order[1:]]).array
                run(inputs, head_map=head_map, mode=mode, snapshots=K, out=out.array, state_out=state.array, **options)
                where = f"{{sizes}} {{gates}} {{n_tokens}} {{order}} {{mode}} {{options}}"
                assert out.intact() and state.intact(), where
                assert_close(out.array, expected, "out " + where)
                assert_close(state.array, kept, "state " + where)
print("ran", sorted(m for m in sys.modules if m.startswith("gdn._level_")))
"""


def python(script, level):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "GDN_LEVEL": level})


def runs_here(level):
    return python("import gdn", level).returncode == 0


@pytest.fixture(params=LEVELS)
def level(request):
    if not runs_here(request.param):
        pytest.skip(f"this machine does not run {request.param}")     # no installation would help: CI may skip it too
    return request.param


def test_a_level_keeps_the_bound(level):
    done = python(SMALL.format(here=str(HERE)), level)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"ran ['gdn._level_{level}']\n"


@pytest.mark.parametrize("level", [name for name in LEVELS if name != gdn.show_config("dicts")["level"]], indirect=True)
def test_a_level_passes_the_check(level):
    """Every kernel; test_main.py has it on the level in use."""
    done = python("from gdn.__main__ import main; raise SystemExit(main(['check']))", level)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"level {level}, " in done.stdout


def test_base_always_runs():
    assert "base" in LEVELS and runs_here("base")


@pytest.mark.parametrize("level", ["avx", "V3", "v5", "native"])
def test_an_unknown_level_is_an_import_error(level):
    done = python("import gdn", level)
    assert done.returncode == 1 and "ImportError" in done.stderr and level in done.stderr


@pytest.mark.slow
def test_the_kernels_tests_on_every_level(level):
    files = sorted(str(p) for name in ("delta_*", "conv", "pointwise", "flush") for p in HERE.glob(f"test_{name}.py"))
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *files], capture_output=True,
                          text=True, env={**os.environ, "GDN_LEVEL": level})
    assert done.returncode == 0, done.stdout[-3000:]
