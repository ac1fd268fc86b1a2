"""Fixtures of the peers.  Where CI is set a missing peer is a failure; elsewhere the tests skip and say which it is."""

import pytest
from helpers import missing

from tests.peers import ggml as ggml_binding
from tests.peers import ik as ik_binding
from tests.peers import llama as llama_binding


def peer(load):
    try:
        return load()
    except ggml_binding.PeerMissing as error:
        missing(f"{error}; pip install 'gdn[peers]'")


@pytest.fixture(scope="session")
def ggml():
    return peer(ggml_binding.load)


@pytest.fixture(scope="session")
def ik():
    return peer(ik_binding.load)


@pytest.fixture(scope="session")
def llama():
    return peer(llama_binding.load)
