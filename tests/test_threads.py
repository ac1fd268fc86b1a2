"""Whose threads run a call's shares: the host's own, none while they do not pay, OpenMP's in a forked child."""

import ctypes
import random
import subprocess
import sys
import threading
from ctypes import c_int32, c_void_p

import numpy as np
import pytest
from c_tools import OK, Api
from helpers import case, same_bits
from test_ring_c import programs  # noqa: F401

import gdn

SHARE = ctypes.CFUNCTYPE(None, c_void_p, c_int32)
FOR = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_int32)
BUSY = 12


class Host:
    """A host's loop: shares late, in another order, some on threads of their own."""

    def __init__(self, api):
        self.api, self.counts, self.inside = api, [], None
        self.function = FOR(self.run)

    def run(self, context, body, job, n_shares):
        self.inside = self.api.set_parallel_for(None, None)
        share, order = SHARE(body), list(range(n_shares))
        random.Random(n_shares).shuffle(order)
        others = [threading.Thread(target=share, args=(job, i)) for i in order[1::2]]
        for i in order[::2]:
            share(job, i)
        for thread in others:
            thread.start()
        for thread in others:
            thread.join()
        self.counts.append(n_shares)

    def __enter__(self):
        assert self.api.set_parallel_for(ctypes.cast(self.function, c_void_p), None) == OK
        return self

    def __exit__(self, *_):
        assert self.api.set_parallel_for(None, None) == OK


@pytest.fixture
def python_api():
    return Api.from_address(gdn.capi)


def run_all(rng, n_threads):
    c = case(rng, 2, 90, 2, 4, 32, 32, "mix")
    x = rng.standard_normal((2, 90, 512)).astype(np.float32)
    weight = rng.standard_normal((512, 4)).astype(np.float32)
    low = np.tril(rng.standard_normal((6, 64, 64)), -1).astype(np.float32) / 64 + np.eye(64, dtype=np.float32)
    inputs = (c[n] for n in ("q", "k", "v", "g", "beta", "state"))
    results = [*gdn.gated_delta_net(*inputs, head_map="tiled", n_threads=n_threads),
               *gdn.causal_conv1d(x, weight, n_threads=n_threads), gdn.l2_norm(x, n_threads=n_threads),
               gdn.rms_norm_gated(x, x, weight[:, 0].copy(), n_threads=n_threads),
               gdn.decay_gate(x, weight[:, 1].copy() ** 2 * -1, weight[:, 2].copy(), gate="softplus", n_threads=n_threads),
               gdn.solve_tri(low, x[:1, :64, :256].repeat(6, 0), n_threads=n_threads)]
    return [r for r in results if r is not None]


@pytest.mark.parametrize("n_threads", [2, 3, 7])
def test_the_hosts_threads(request, python_api, n_threads):
    """Every kernel: as many shares as n_threads says and there are items for, the bits those of one thread."""
    seed = list(request.node.name.encode())
    alone = run_all(np.random.default_rng(seed), 1)
    with Host(python_api) as host:
        shared = run_all(np.random.default_rng(seed), n_threads)
        assert host.counts == [min(n_threads, n) for n in (4, 6, 6, 6, 6, 24)] and host.inside == BUSY
        run_all(np.random.default_rng(seed), 1)
        assert len(host.counts) == 6                  # a call on one thread asks nobody
    again = run_all(np.random.default_rng(seed), n_threads)
    assert len(host.counts) == 6
    for a, b, c in zip(alone, shared, again, strict=True):
        assert same_bits(a, b) and same_bits(a, c)


def test_a_pool_of_pthreads(programs):  # noqa: F811
    build, environment = programs
    done = subprocess.run([build / "library" / "pool"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout + done.stderr


CHILD = """
import os
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import numpy as np, gdn
gdn.set_num_threads(2)
x = np.random.default_rng(0).standard_normal((400, 512)).astype(np.float32)
def threads():
    gdn.l2_norm(x, n_threads=2)
    return len(os.listdir("/proc/self/task"))
if {before}:
    threads()
child = os.fork()
if child == 0:
    os._exit(threads())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize("before, after", [(False, 2), (True, 1)])
def test_forked_children(before, after):
    """Threads where the parent had none, serial where it had some."""
    if not gdn.show_config("dicts")["openmp"]:
        pytest.skip("built without OpenMP")
    done = subprocess.run([sys.executable, "-c", CHILD.format(before=before)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(after), done.stdout + done.stderr
