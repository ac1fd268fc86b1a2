"""The state ring: one flat buffer of per-sequence states, shared with C and other processes, with exact rollback."""

from gdn._ring import RingBusyError, RingFullError, StateLostError, StateRing, Step

__all__ = ["RingBusyError", "RingFullError", "StateLostError", "StateRing", "Step"]
