"""Options of the benchmark run: BLAS on one thread unless a case says more, peers listed."""

import os

for _name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, str(os.cpu_count()))     # threadpoolctl lowers it per case


def pytest_report_header(config):
    from benchmarks.peers import versions
    return ["peers: " + ", ".join(f"{name} {version or 'ABSENT'}" for name, version in versions().items())]
