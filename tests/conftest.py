"""Shared set-up: one hypothesis profile, so that a run on a busy machine fails on wrong numbers only."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from ring_model import Run

settings.register_profile("gdn", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gdn")


@pytest.fixture
def rng(request):
    """A generator of its own for every test, the same in every run."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture
def one():
    """A ring that holds sequence 0."""
    run = Run()
    run.acquire(0)
    return run
