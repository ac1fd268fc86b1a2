"""The rows of the target table: what each ratio is of, what is wanted, and how it is measured.

A row's function runs in a process of its own (BLAS pinned to one thread, GDN_LEVEL as the row says), checks the answer,
times, and returns (value, details).  ``python -m benchmarks.rows NAME`` does just that and prints JSON.
"""

from benchmarks.rows import kernels, log, peers, whole
from benchmarks.rows.table import ROWS

__all__ = ["ROWS", "kernels", "log", "peers", "whole"]
