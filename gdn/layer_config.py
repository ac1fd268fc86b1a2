"""What a layer is: its extents, its head order, the forms of its gates and norms, checked once."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

__all__ = ["LayerConfig"]

FLOAT32_MAX = float(np.finfo(np.float32).max)
CHOICES = {"kind": ("gdn", "kda"), "head_map": ("tiled", "interleaved"), "l2_form": ("sum", "max"),
           "activation": ("silu", "sigmoid"), "gate": ("softplus", "bounded", "clamped")}
EXTENTS = ("n_embd", "H_k", "H_v", "S_k", "S_v", "width")
RANKS = ("f_rank", "g_rank")
NOT_NEGATIVE = ("norm_eps", "l2_eps")
POSITIVE = ("beta_factor", "output_gate_factor")


def finite(name, x):
    """x, a number that float32 holds.  ValueError otherwise."""
    if isinstance(x, bool) or not isinstance(x, (int, float, np.integer, np.floating)) or not abs(x) <= FLOAT32_MAX:
        raise ValueError(f"{name} must be a finite number, got {x!r}")
    return float(x)


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """A layer but for its weights.  ValueError for a value that no layer has; nothing is inferred from another field.

    kind          "gdn": a decay per value head;  "kda": one per key channel
    n_embd, H_k, H_v, S_k, S_v, width    hidden size, key and value heads, their sizes, the convolution's width
    head_map      "interleaved": value head h reads key head h // (H_v / H_k);  "tiled": h % H_k
    norm_eps, l2_eps, l2_form            of the gated norm; of the L2 norm of q and k
    beta_factor   beta = beta_factor * sigmoid(b)
    gate          of x = a + dt_bias, A <= 0:  "softplus": A softplus(x);  "bounded": lower_bound sigmoid(-A x);
                  "clamped": max(A softplus(x), lower_bound), with lower_bound < 0, None for softplus
    activation    of the output gate, "silu" or "sigmoid";  output_gate_factor: what it is multiplied by
    norm_offset   added to the gated norm's weight: 1 where that is kept zero-centred
    f_rank, g_rank    ranks of the projections to a and z, None: full rank
    family        the model's name, for `tag`
    projections   {name under which a projection came: its name in `gdn.weight_layouts`}, further names for LoRA
    """

    kind: str
    n_embd: int
    H_k: int
    H_v: int
    S_k: int
    S_v: int
    width: int
    head_map: str
    norm_eps: float
    activation: str
    l2_eps: float = 1e-6
    l2_form: str = "sum"
    beta_factor: float = 1.0
    gate: str = "softplus"
    lower_bound: float | None = None
    output_gate_factor: float = 1.0
    norm_offset: float = 0.0
    f_rank: int | None = None
    g_rank: int | None = None
    family: str = ""
    projections: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"config: {name} must be one of {choices}, got {getattr(self, name)!r}")
        for name in (*EXTENTS, *RANKS):
            x = getattr(self, name)
            if x is None and name in RANKS:
                continue
            if isinstance(x, bool) or not isinstance(x, (int, np.integer)) or x < 1:
                raise ValueError(f"config: {name} must be a positive integer, got {x!r}")
            object.__setattr__(self, name, int(x))
        for name in (*NOT_NEGATIVE, *POSITIVE, "norm_offset"):
            x = finite(f"config: {name}", getattr(self, name))
            if x < 0 and name in NOT_NEGATIVE or x <= 0 and name in POSITIVE:
                raise ValueError(f"config: {name} must {'not be negative' if name in NOT_NEGATIVE else 'be positive'}, got {x}")
            object.__setattr__(self, name, x)
        if self.H_v % self.H_k:
            raise ValueError(f"config: H_v = {self.H_v} is no multiple of H_k = {self.H_k}")
        self._check_bound()
        if not isinstance(self.family, str):
            raise ValueError(f"config: family must be a string, got {self.family!r}")
        object.__setattr__(self, "projections", dict(self.projections))

    def _check_bound(self):
        if self.gate == "softplus":
            if self.lower_bound is not None:
                raise ValueError(f"config: lower_bound is {self.lower_bound!r}, gate \"softplus\" has none: say gate=\"bounded\" "
                                 f"or \"clamped\"")
            return
        if self.lower_bound is None:
            raise ValueError(f"config: gate \"{self.gate}\" needs a lower_bound")
        bound = finite("config: lower_bound", self.lower_bound)
        if bound >= 0:
            raise ValueError(f"config: lower_bound is the least log decay, below 0, got {bound}")
        object.__setattr__(self, "lower_bound", bound)

    def override(self, overrides):
        """This config with the fields of the mapping ``overrides`` in place of its own, checked as any."""
        if overrides is None:
            return self
        if not isinstance(overrides, Mapping):
            raise TypeError(f"overrides must be a mapping, got {type(overrides).__name__}")
        fixed = {*EXTENTS, *RANKS, "kind", "family", "projections"}
        wrong = [str(name) for name in overrides if name in fixed or name not in self.__dataclass_fields__]
        if wrong:
            known = ", ".join(name for name in self.__dataclass_fields__ if name not in fixed)
            raise ValueError(f"overrides: {', '.join(wrong)} cannot be said, only {known}")
        return replace(self, **overrides)

    @property
    def is_tiled(self):
        """Whether value heads lie in another order than a checkpoint's, which groups them by key head."""
        return self.head_map == "tiled" and 1 < self.H_k < self.H_v

    @property
    def channels(self):
        """Of the convolution: q, k and v of all heads."""
        return 2 * self.H_k * self.S_k + self.H_v * self.S_v

    @property
    def tag(self):
        """1 to 2**63 - 1 for a ring of this layer: of family, head order and extents, the same in every process."""
        heads = "tiled" if self.is_tiled else "interleaved"
        said = f"{self.family} {self.kind} {heads} {self.H_k} {self.H_v} {self.S_k} {self.S_v} {self.width}"
        return int.from_bytes(hashlib.sha256(said.encode()).digest()[:8], "little") >> 1 or 1
