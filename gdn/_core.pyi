from typing import Any, Literal, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Buffer, disjoint_base

class _DLPack(Protocol):
    def __dlpack__(self, *, stream: Any = ..., max_version: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

_Data = Buffer | _DLPack                # numpy arrays and gdn.Tensor among them
_F32 = NDArray[np.float32]
_Floats = NDArray[Any]                  # of an argument's type: float32, float16 or ml_dtypes.bfloat16
_Out = TypeVar("_Out", bound=_Data)
_HeadMap = Literal["tiled", "interleaved"] | None
_Mode = Literal["auto", "chunked", "recurrent"]
_L2Form = Literal["sum", "max"]
_Rounding = Literal["nearest", "stochastic"]

capi: int

@disjoint_base
class TokenLog:
    def __init__(self, k: _Data, d: _Data, g: _Data, x: _Data | None = None) -> None: ...
    @staticmethod
    def allocate(n_entries: int, *, H_k: int, H_v: int, S_k: int, S_v: int, per_channel: bool = False,
                 channels: int = 0) -> TokenLog: ...
    @property
    def k(self) -> _F32: ...
    @property
    def d(self) -> _F32: ...
    @property
    def g(self) -> _F32: ...
    @property
    def x(self) -> _F32 | None: ...
    @property
    def n_entries(self) -> int: ...

@overload
def gated_delta_net(
    q: _Data, k: _Data, v: _Data, g: _Data, beta: _Data, state: _Data | None = None, *, scale: float | None = None,
    head_map: _HeadMap = None, mode: _Mode = "auto", snapshots: int | None = None, cu_seqlens: ArrayLike | None = None,
    qk_l2norm: bool = False, l2_eps: float = 1e-6, l2_form: _L2Form = "sum", beta_logit: bool = False, out: None = None,
    state_out: None = None, n_threads: int | None = None,
    rounding: _Rounding = "nearest", seed: int | None = None) -> tuple[_Floats, _Floats]: ...
@overload
def gated_delta_net(
    q: _Data, k: _Data, v: _Data, g: _Data, beta: _Data, state: _Data | None = None, *, scale: float | None = None,
    head_map: _HeadMap = None, mode: _Mode = "auto", snapshots: int | None = None, cu_seqlens: ArrayLike | None = None,
    qk_l2norm: bool = False, l2_eps: float = 1e-6, l2_form: _L2Form = "sum", beta_logit: bool = False,
    out: _Data | None = None, state_out: _Data | None = None, n_threads: int | None = None,
    rounding: _Rounding = "nearest", seed: int | None = None) -> tuple[Any, Any]: ...
@overload
def gated_delta_net_inplace(
    q: _Data, k: _Data, v: _Data, g: _Data, beta: _Data, cache: _Data, rows_in: ArrayLike,
    rows_out: ArrayLike | None = None, *, scale: float | None = None, head_map: _HeadMap = None, mode: _Mode = "auto",
    cu_seqlens: ArrayLike | None = None, qk_l2norm: bool = False, l2_eps: float = 1e-6, l2_form: _L2Form = "sum",
    beta_logit: bool = False, out: None = None, n_threads: int | None = None,
    log: TokenLog | None = None, log_in: ArrayLike | None = None, log_out: ArrayLike | None = None,
    parents: ArrayLike | None = None, checkpoints: ArrayLike | None = None,
    rounding: _Rounding = "nearest", seed: int | None = None) -> _Floats: ...
@overload
def gated_delta_net_inplace(
    q: _Data, k: _Data, v: _Data, g: _Data, beta: _Data, cache: _Data, rows_in: ArrayLike,
    rows_out: ArrayLike | None = None, *, scale: float | None = None, head_map: _HeadMap = None, mode: _Mode = "auto",
    cu_seqlens: ArrayLike | None = None, qk_l2norm: bool = False, l2_eps: float = 1e-6, l2_form: _L2Form = "sum",
    beta_logit: bool = False, out: _Out, n_threads: int | None = None,
    log: TokenLog | None = None, log_in: ArrayLike | None = None, log_out: ArrayLike | None = None,
    parents: ArrayLike | None = None, checkpoints: ArrayLike | None = None,
    rounding: _Rounding = "nearest", seed: int | None = None) -> _Out: ...
@overload
def causal_conv1d(
    x: _Data, weight: _Data, bias: _Data | None = None, state: _Data | None = None, *,
    activation: Literal["silu"] | None = "silu", snapshots: int | None = None, cu_seqlens: ArrayLike | None = None,
    out: None = None, state_out: None = None, n_threads: int | None = None,
    rounding: _Rounding = "nearest", seed: int | None = None) -> tuple[_Floats, _Floats]: ...
@overload
def causal_conv1d(
    x: _Data, weight: _Data, bias: _Data | None = None, state: _Data | None = None, *,
    activation: Literal["silu"] | None = "silu", snapshots: int | None = None, cu_seqlens: ArrayLike | None = None,
    out: _Data | None = None, state_out: _Data | None = None, n_threads: int | None = None,
    rounding: _Rounding = "nearest", seed: int | None = None) -> tuple[Any, Any]: ...
@overload
def causal_conv1d_inplace(
    x: _Data, weight: _Data, bias: _Data | None, cache: _Data, rows_in: ArrayLike, rows_out: ArrayLike | None = None, *,
    activation: Literal["silu"] | None = "silu", cu_seqlens: ArrayLike | None = None, out: None = None,
    n_threads: int | None = None,
    log: TokenLog | None = None, log_in: ArrayLike | None = None, log_out: ArrayLike | None = None,
    parents: ArrayLike | None = None, checkpoints: ArrayLike | None = None,
    rounding: _Rounding = "nearest", seed: int | None = None) -> _Floats: ...
@overload
def causal_conv1d_inplace(
    x: _Data, weight: _Data, bias: _Data | None, cache: _Data, rows_in: ArrayLike, rows_out: ArrayLike | None = None, *,
    activation: Literal["silu"] | None = "silu", cu_seqlens: ArrayLike | None = None, out: _Out,
    n_threads: int | None = None,
    log: TokenLog | None = None, log_in: ArrayLike | None = None, log_out: ArrayLike | None = None,
    parents: ArrayLike | None = None, checkpoints: ArrayLike | None = None,
    rounding: _Rounding = "nearest", seed: int | None = None) -> _Out: ...
@overload
def l2_norm(x: _Data, eps: float = 1e-6, *, form: _L2Form = "sum", out: None = None,
            n_threads: int | None = None) -> _Floats: ...
@overload
def l2_norm(x: _Data, eps: float = 1e-6, *, form: _L2Form = "sum", out: _Out, n_threads: int | None = None) -> _Out: ...
@overload
def rms_norm_gated(x: _Data, gate: _Data, weight: _Data, eps: float = 1e-6, *,
                   activation: Literal["silu", "sigmoid"] = "silu", out: None = None,
                   n_threads: int | None = None) -> _Floats: ...
@overload
def rms_norm_gated(x: _Data, gate: _Data, weight: _Data, eps: float = 1e-6, *,
                   activation: Literal["silu", "sigmoid"] = "silu", out: _Out, n_threads: int | None = None) -> _Out: ...
@overload
def decay_gate(a: _Data, A: _Data, dt_bias: _Data, *, gate: Literal["softplus", "bounded", "clamped"] = "softplus",
               lower_bound: float | None = None, out: None = None,
               n_threads: int | None = None) -> _F32: ...
@overload
def decay_gate(a: _Data, A: _Data, dt_bias: _Data, *, gate: Literal["softplus", "bounded", "clamped"] = "softplus",
               lower_bound: float | None = None, out: _Out,
               n_threads: int | None = None) -> _Out: ...
@overload
def solve_tri(a: _Data, b: _Data, *, lower: bool = True, unit: bool = False, out: None = None,
              n_threads: int | None = None) -> _F32: ...
@overload
def solve_tri(a: _Data, b: _Data, *, lower: bool = True, unit: bool = False, out: _Out,
              n_threads: int | None = None) -> _Out: ...
def get_num_threads() -> int: ...
def set_num_threads(n: int | None) -> None: ...
