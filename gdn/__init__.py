"""Gated DeltaNet and Kimi Delta Attention on the CPU."""

from gdn._tensor import Tensor  # noqa: F401
from gdn._version import __version__  # noqa: F401
from gdn.ring import RingFullError, StateLostError, StateRing  # noqa: F401
