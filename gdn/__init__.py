"""Gated DeltaNet and Kimi Delta Attention on the CPU."""

from gdn import reference  # noqa: F401
from gdn._core import capi, gated_delta_net, gated_delta_net_inplace, get_num_threads, set_num_threads  # noqa: F401
from gdn._tensor import Tensor  # noqa: F401
from gdn._version import __version__  # noqa: F401
from gdn.ring import RingFullError, StateLostError, StateRing  # noqa: F401
