"""Whole layers by transformers and by gdn on the same weights, prefill and decode, for every family."""

import importlib

import pytest
from threadpoolctl import threadpool_limits

from benchmarks import layers, peers
from benchmarks.machine import cpu_name, level

PREFILL = 512
THREADS = (1, 2)


@pytest.fixture(params=layers.FAMILIES)
def family(request):
    peers.present("transformers", importlib.import_module, "transformers")
    return request.param


@pytest.mark.parametrize("name", ["gdn", "transformers"])
@pytest.mark.parametrize("n_threads", THREADS)
@pytest.mark.parametrize("n_tokens", [1, PREFILL])
def test_layer(benchmark, family, n_tokens, n_threads, name):
    benchmark.group = f"layer{n_tokens}-{family}-{n_threads}"
    with threadpool_limits(n_threads, "blas"):
        theirs, ours = layers.both_calls(family, n_tokens, n_threads)
        benchmark.extra_info.update(cpu=cpu_name(), level=level(), n_threads=n_threads, n_tokens=n_tokens)
        benchmark.pedantic(ours if name == "gdn" else theirs, rounds=5 if n_tokens == 1 else 3, warmup_rounds=1,
                           iterations=20 if n_tokens == 1 else 1)
