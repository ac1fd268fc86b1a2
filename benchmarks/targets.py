"""Measure the target table: ``python -m benchmarks.targets [NAME ...]`` (names or beginnings of names; none = all).

Every row is measured in a process of its own as a ratio of two calls that take turns (see pairs.py).
"""

import argparse
import json
import os
import subprocess
import sys

from benchmarks import machine
from benchmarks.rows import ROWS


def measure(name):
    """Run one row; its result as a dict, or {"absent": ...} / {"failed": ...}."""
    level = ROWS[name].level
    if level and level not in machine.levels():
        return {"absent": f"this machine does not run level {level}"}
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if level:
        env["GDN_LEVEL"] = level
        if level == "v3":
            env["OPENBLAS_CORETYPE"] = "Haswell"        # numpy's product on AVX2 as well
    done = subprocess.run([sys.executable, "-m", "benchmarks.rows", name], env=env, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def wanted(r):
    return (">= " if r.at_least else "<= ") + f"{r.target:g}" + (f" ({r.stretch:g})" if r.stretch is not None else "")


def cells(name, result):
    """(value, wanted, verdict) as text."""
    r = ROWS[name]
    if "value" not in result:
        return next(iter(result)), wanted(r), "-"
    return f"{result['value']:.2f} {r.unit}".strip(), wanted(r), r.verdict(result["value"])


def line(name, result):
    value, bound, verdict = cells(name, result)
    details = result.get("details") or result
    return f"{name:16} {value:>10} {bound:>14} {verdict:8} {ROWS[name].what} [" + ", ".join(
        f"{k} {v}" for k, v in details.items()) + "]"


def run(names):
    """Measure the rows, printing each as it comes; {name: result}."""
    print(f"{'row':16} {'value':>10} {'wanted':>14} {'':8} what")
    results = {}
    for name in names:
        results[name] = measure(name)
        print(line(name, results[name]), flush=True)
    return results


def chosen(words):
    """Rows named, or beginning with a word that names none; all without words.  ValueError for a word that fits none."""
    for w in words:
        if not any(n.startswith(w) for n in ROWS):
            raise ValueError(f"no row is named {w}; there are {', '.join(ROWS)}")
    return [n for n in ROWS if not words or any(n == w or (w not in ROWS and n.startswith(w)) for w in words)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows: " + ", ".join(ROWS))
    args = parser.parse_args()
    try:
        names = chosen(args.names)
    except ValueError as error:
        parser.error(error)
    run(names)


if __name__ == "__main__":
    main()
