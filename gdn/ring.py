"""The state ring: one flat buffer of per-sequence states, shared with C and other processes, with exact rollback."""

from gdn._errors import RingBusyError, RingFullError, StateLostError
from gdn._ring import StateRing, Step

__all__ = ["RingBusyError", "RingFullError", "StateLostError", "StateRing", "Step"]
