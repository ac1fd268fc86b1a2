"""The example whose cache ggml owns runs and finds every state as it should be."""

import os
import subprocess
import sys
from pathlib import Path

import gdn

EXAMPLE = Path(__file__).parents[2] / "examples" / "ggml_cache.py"


def test_example(ggml):
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(Path(gdn.__file__).parents[1])})
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout + done.stderr
    assert done.stdout.count("error") == 15
