"""What the numbers were measured on."""

import os
import platform

import numpy as np

import gdn


def cpu_name():
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def cpu_flags():
    try:
        with open("/proc/cpuinfo") as info:
            return set(next(line for line in info if line.startswith("flags")).split())
    except (OSError, StopIteration):
        return set()


def levels():
    """The levels of gdn that this machine runs, the best last."""
    known = ["base", "v3", "v4"]
    return known[:known.index(gdn.show_config("dicts")["best_level"]) + 1]


def blas():
    """numpy's BLAS as threadpoolctl sees it."""
    import threadpoolctl
    np.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
    return ", ".join(f"{p['internal_api']} {p['version']} ({p.get('architecture', '?')})"
                     for p in threadpoolctl.threadpool_info() if p["user_api"] == "blas")


def level():
    """The level that this process has loaded."""
    return gdn.show_config("dicts")["level"]


def description():
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "level": level(), "system": platform.platform(),
            "python": platform.python_version(), "numpy": np.__version__, "blas": blas()}
