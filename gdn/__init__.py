"""Gated DeltaNet and Kimi Delta Attention on the CPU."""

from gdn import reference  # noqa: F401
from gdn._config import get_include, show_config  # noqa: F401
from gdn._core import (  # noqa: F401
    capi,
    causal_conv1d,
    causal_conv1d_inplace,
    decay_gate,
    gated_delta_net,
    gated_delta_net_inplace,
    get_num_threads,
    l2_norm,
    rms_norm_gated,
    set_num_threads,
    solve_tri,
)
from gdn._tensor import Tensor  # noqa: F401
from gdn._version import __version__  # noqa: F401
from gdn.batch import Batch  # noqa: F401
from gdn.layer import GatedDeltaNet, KimiDeltaAttention  # noqa: F401
from gdn.ring import RingFullError, StateLostError, StateRing  # noqa: F401
