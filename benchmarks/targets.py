"""Measure the target table: ``python -m benchmarks.targets [NAME ...]`` (names or beginnings of names; none = all).

Every row is measured in a process of its own as a ratio of two calls that take turns (see pairs.py).
"""

import argparse
import json
import os
import subprocess
import sys

from benchmarks.rows import ROWS


def measure(name):
    """Run one row; its result as a dict, or {"absent": ...} / {"failed": ...}."""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if ROWS[name].level:
        env["GDN_LEVEL"] = ROWS[name].level
    run = subprocess.run([sys.executable, "-m", "benchmarks.rows", name], env=env, capture_output=True, text=True)
    if run.returncode:
        return {"failed": run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"exit code {run.returncode}"}
    return json.loads(run.stdout.splitlines()[-1])


def line(name, result):
    r = ROWS[name]
    bound = ">=" if r.at_least else "<="
    wanted = f"{bound} {r.target:g}" + (f" ({r.stretch:g})" if r.stretch is not None else "")
    if "value" not in result:
        kind = next(iter(result))
        return f"{r.name:18} {kind:>9} {wanted:>14} {'':8} {r.what}: {result[kind]}"
    details = ", ".join(f"{k} {v}" for k, v in result["details"].items())
    value, verdict = result["value"], r.verdict(result["value"])
    return f"{r.name:18} {value:7.2f} {r.unit:2}{wanted:>14} {verdict:8} {r.what} [{details}]"


def chosen(words):
    """Rows named, or beginning with a word that names none; all without words."""
    return [n for n in ROWS if not words or any(n == w or (w not in ROWS and n.startswith(w)) for w in words)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows: " + ", ".join(ROWS))
    args = parser.parse_args()
    names = chosen(args.names)
    if not names:
        parser.error(f"no row is named {' '.join(args.names)}; there are {', '.join(ROWS)}")
    print(f"{'row':18} {'value':>9} {'wanted':>14} {'':8} what")
    for name in names:
        print(line(name, measure(name)), flush=True)


if __name__ == "__main__":
    main()
