"""The plug-in inside an unmodified ggml and an unmodified llama.cpp."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf_models as models
import numpy as np
import pytest

import gdn

ROOT = Path(__file__).parents[2]
ARCHS = (*models.GDN_ARCHS, *models.KDA_ARCHS)


def run(script, *arguments, **environment):
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests"), *filter(None, sys.path)))
    return subprocess.run([sys.executable, str(ROOT / "tests" / script), *map(str, arguments)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "passive", **environment})


@pytest.fixture(scope="module")
def runs(llama, tmp_path_factory):
    """{arch: {scenario: [error, counts]}} of every architecture's whole model."""
    folder = tmp_path_factory.mktemp("models")
    for arch in ARCHS:
        rng = np.random.default_rng([7, *arch.encode()])
        options = {"bound": -5.0} if arch == "bailingmoe3" else {}
        models.write(folder / f"{arch}.gguf", arch, *models.model(arch, rng, **options))
    done = run("ggml_plugin_runs.py", gdn.get_ggml_backend(), folder, 3)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", ARCHS)
def test_whole_models(runs, arch):
    """The same logits: prefill, decode, several sequences, rollback, saved states, contexts used again."""
    for scenario, (error, counts) in runs[arch].items():
        assert error < 1e-5, (scenario, error)
        assert counts["delta"] > 0 and counts["conv"] > 0, scenario
        if arch in ("qwen35", "qwen35moe"):      # everything around the two ops is done by them
            assert counts["delta"] == counts["delta_norms"] == counts["delta_gathers"] == counts["delta_copies"], counts
            assert counts["conv"] == counts["conv_windows"] == counts["delta"], counts


def test_ops(ggml):
    """Every combination of ggml's own test of backends for these ops."""
    done = run("ggml_plugin_ops.py")
    assert done.returncode == 0, done.stderr
    for case, error in json.loads(done.stdout):
        assert error < 2e-5, case


def test_loading(ggml):
    """A wrong file, twice, unloaded and loaded again: refused or right, the process goes on."""
    done = run("ggml_plugin_ops.py", "loading")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "well", done.stdout + done.stderr
