"""Gated DeltaNet and Kimi Delta Attention on the CPU."""

from gdn import reference
from gdn._config import get_ggml_backend, get_include, get_library, show_config
from gdn._core import (
    TokenLog,
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
from gdn._tensor import Tensor
from gdn._version import __version__
from gdn.batch import Batch
from gdn.layer import GatedDeltaNet, KimiDeltaAttention
from gdn.layer_config import LayerConfig
from gdn.ring import RingBusyError, RingFullError, StateLostError, StateRing

__all__ = [
    "Batch", "GatedDeltaNet", "KimiDeltaAttention", "LayerConfig", "RingBusyError", "RingFullError", "StateLostError",
    "StateRing", "Tensor", "TokenLog", "capi", "causal_conv1d", "causal_conv1d_inplace", "decay_gate", "gated_delta_net",
    "gated_delta_net_inplace", "get_ggml_backend", "get_include", "get_library", "get_num_threads", "l2_norm", "reference",
    "rms_norm_gated", "set_num_threads", "show_config", "solve_tri", "__version__",
]
