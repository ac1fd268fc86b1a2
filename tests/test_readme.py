"""Every Python block of the README runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_blocks():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("i", range(len(BLOCKS)))
def test_block_runs(i, monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(compile(BLOCKS[i], f"README.md, block {i + 1}", "exec"), {})
