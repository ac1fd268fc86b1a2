"""python -m gdn, and what show_config tells."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gdn
from gdn import __main__, _check


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "gdn", *map(str, arguments)], capture_output=True, text=True)


def test_info_names_the_build():
    done, config = command("info"), gdn.show_config("dicts")
    assert done.returncode == 0
    for name in ("version", "compiler", "level", "openmp", "flags"):
        assert str(config[name]) in done.stdout
    assert Path(config["include"], "gdn.h").is_file() and config["include"] == gdn.get_include()
    assert config["level"] in ("base", "v3", "v4") and config["threads"] == gdn.get_num_threads()


def test_the_processor_has_a_name(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda _: "cpu family\t: 6\nmodel\t\t: 85\nmodel name\t: A: B 9000\n" * 2)
    assert gdn.show_config("dicts")["processor"] == "A: B 9000"
    monkeypatch.setattr(Path, "read_text", lambda _: "")
    assert gdn.show_config("dicts")["processor"]


def test_show_config_refuses_other_modes():
    with pytest.raises(ValueError, match="'json'"):
        gdn.show_config("json")


def test_check_passes_and_shows_progress():
    done = command("check")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) >= 10 and lines[-1].startswith("0 of ")


@pytest.mark.parametrize("wrong", [1e-3, np.nan])
def test_check_reports_a_miss(monkeypatch, capsys, wrong):
    compute = _check.compute

    def slightly_off(way, q, *arguments):
        out, state = compute(way, q, *arguments)
        if out.size and q.shape[-1] == 20:
            out.flat[-1] += wrong * np.abs(out).max()
        return out, state
    monkeypatch.setattr(_check, "compute", slightly_off)
    monkeypatch.setattr(_check, "SIZES", ((16, 16), (20, 33)))
    assert __main__.main(["check"]) == 1
    printed = capsys.readouterr().out
    assert "MISS" in printed and "sizes (20, 33)" in printed and "sizes (16, 16)" not in printed.split("worst error")[-2]


def test_bench_prints_every_row():
    done = command("bench", "--seconds", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("GFLOP/s") == 3 and done.stdout.count("GB/s") == 4


def test_no_command_prints_the_usage():
    done = command()
    assert done.returncode == 2 and "info" in done.stderr and "Traceback" not in done.stderr
