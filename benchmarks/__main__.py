"""Everything ``make bench`` does: the target table, the cases, the plots, JSON in benchmarks/results.

    python -m benchmarks                     all of it, about fifteen minutes
    python -m benchmarks --only targets      the table alone (or cases, or plots)
    python -m benchmarks --write-docs        also renew the table in docs/PERFORMANCE.md
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.update(OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

from benchmarks import machine, peers, plots, targets
from benchmarks.rows import ROWS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs" / "PERFORMANCE.md"
MARKS = "<!-- measured: begin -->", "<!-- measured: end -->"


def peers_line():
    return ", ".join(f"{name} {version or 'ABSENT'}" for name, version in peers.versions().items())


def write(name, data):
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")


def table(results, about):
    """The measured section of docs/PERFORMANCE.md."""
    lines = [f"Measured on {about['date']}: {about['cpu']}, {about['cores']} cores, level {about['level']}, "
             f"{about['system']}; Python {about['python']}, numpy {about['numpy']} with {about['blas']}; "
             f"{about['peers']}.", "", "| row | what | measured | wanted (stretch) | |", "|---|---|---|---|---|"]
    for name, result in results.items():
        value, bound, verdict = targets.cells(name, result)
        details = result.get("details") or result
        rates = ", ".join(f"{k} {v}" for k, v in details.items() if k.endswith(("gflops", "gb_s")))
        what = ROWS[name].what + (f" ({rates})" if rates else "")
        lines.append(f"| `{name}` | {what} | {value} | {bound} | {verdict} |")
    return "\n".join(lines)


def write_docs(text):
    before, rest = DOCS.read_text().split(MARKS[0])
    DOCS.write_text(before + MARKS[0] + "\n" + text + "\n" + MARKS[1] + rest.split(MARKS[1])[1])
    print(f"renewed {DOCS.relative_to(ROOT)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=["targets", "cases", "plots"])
    parser.add_argument("--write-docs", action="store_true")
    parser.add_argument("names", nargs="*", help="rows of the table, or beginnings of their names; none = all")
    args = parser.parse_args()
    if args.write_docs and args.names:
        parser.error("--write-docs renews the whole table: name no rows")
    try:
        names = targets.chosen(args.names)
    except ValueError as error:
        parser.error(error)
    parts = args.only or ["targets", "cases", "plots"]
    RESULTS.mkdir(exist_ok=True)
    about = {"date": datetime.date.today().isoformat(), **machine.description(), "peers": peers_line()}
    print(f"{about['cpu']}, {about['cores']} cores, level {about['level']}; {about['peers']}")
    failed = 0
    if "targets" in parts:
        results = targets.run(names)
        write("targets", {"about": about, "rows": {
            n: {"what": ROWS[n].what, "target": ROWS[n].target, "stretch": ROWS[n].stretch, **r}
            for n, r in results.items()}})
        failed = sum("failed" in r for r in results.values())
        if args.write_docs:
            write_docs(table(results, about))
    if "plots" in parts:
        curves = plots.measure()
        write("plots", {"about": about, **curves})
        folder = ROOT / "docs" if args.write_docs else RESULTS
        plots.draw(curves, folder, about["cpu"])
        print(f"drew prompt.svg and decode.svg in {folder.relative_to(ROOT)}")
    if "cases" in parts:
        files = sorted(map(str, (ROOT / "benchmarks").glob("bench_*.py")))
        failed += subprocess.run([sys.executable, "-m", "pytest", "-q", *files, "--benchmark-columns=median,rounds",
                                  "-p", "no:cacheprovider", f"--benchmark-json={RESULTS / 'cases.json'}"], cwd=ROOT).returncode
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
