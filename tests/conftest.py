"""Shared set-up: one hypothesis profile, so that a run on a busy machine fails on wrong numbers only."""

import ctypes

import numpy as np
import pytest
from c_tools import Api
from hypothesis import HealthCheck, settings
from ring_tools import Run

import gdn

settings.register_profile("gdn", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gdn")


@pytest.fixture
def rng(request):
    """A generator of its own for every test, the same in every run."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture(params=["planes", "log"])
def one(request):
    """A ring of either form that holds sequence 0."""
    run = Run(form=request.param)
    run.acquire(0)
    return run


def library_table():
    """The address of libgdn.so's table, as this process has it beside Python's."""
    get = ctypes.CDLL(gdn.get_library()).gdn_get_api
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_uint32]
    return get(Api.from_address(gdn.capi).abi)


@pytest.fixture(scope="session", params=["python", "library"])
def api(request):
    """The C face's table, from Python and from the library that needs none."""
    return Api.from_address(gdn.capi if request.param == "python" else library_table())
