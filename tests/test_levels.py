"""Every instruction-set level this machine runs: chosen by GDN_LEVEL, held to the same bound."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gdn

HERE = Path(__file__).parent
LEVELS = [name for name in ("base", "v3", "v4") if list(Path(gdn.__file__).parent.glob(f"_level_{name}.*.so"))]

SMALL = """
import sys
sys.path.insert(0, {here!r})
import numpy as np
from helpers import GATES, Carved, assert_close, case, run, truth
rng = np.random.default_rng(0)
for sizes in ((1, 1), (3, 5), (16, 16), (20, 33), (64, 40), (128, 128)):
    for i, gates in enumerate(GATES):
        for n_tokens in (1, 2, 33, 70):
            c = case(rng, 1 + i % 3, n_tokens, 1, 2, *sizes, gates, bool(i % 2))
            expected, final, _ = truth(c, "tiled")
            inputs = {{n: Carved(x).array for n, x in c.items()}}
            for order in ([0, 1, 2, 3], [0, 1, 3, 2]):
                for mode in ("recurrent", "chunked"):
                    out, state = Carved(shape=c["v"].shape), Carved(shape=c["state"].shape, order=order)
                    inputs["state"] = Carved(c["state"], order=order).array
                    run(inputs, head_map="tiled", mode=mode, out=out.array, state_out=state.array)
                    where = f"{{sizes}} {{gates}} {{n_tokens}} {{order}} {{mode}}"
                    assert out.intact() and state.intact(), where
                    assert_close(out.array, expected, "out " + where)
                    assert_close(state.array, final, "state " + where)
print("ran", sorted(m for m in sys.modules if m.startswith("gdn._level_")))
"""


def python(script, level):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "GDN_LEVEL": level})


def runs_here(level):
    return python("import gdn", level).returncode == 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_keeps_the_bound(level):
    done = python(SMALL.format(here=str(HERE)), level)
    if "asks for more than this machine runs" in done.stderr:
        pytest.skip(f"this machine does not run {level}")             # no installation would help: CI may skip it too
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"ran ['gdn._level_{level}']\n"


def test_base_always_runs():
    assert "base" in LEVELS and runs_here("base")


@pytest.mark.parametrize("level", ["avx", "V3", "v5", "native"])
def test_an_unknown_level_is_an_import_error(level):
    done = python("import gdn", level)
    assert done.returncode == 1 and "ImportError" in done.stderr and level in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_the_delta_rules_tests_on_every_level(level):
    if not runs_here(level):
        pytest.skip(f"this machine does not run {level}")             # no installation would help: CI may skip it too
    files = sorted(str(p) for p in HERE.glob("test_delta_*.py"))
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *files], capture_output=True,
                          text=True, env={**os.environ, "GDN_LEVEL": level})
    assert done.returncode == 0, done.stdout[-3000:]
