"""Exceptions of calls that a ring refuses."""


class RingFullError(RuntimeError):
    """Every slot of the ring holds a sequence."""


class RingBusyError(ValueError):
    """Somebody else has what the call needs: the sequence is in a step, being read or filled, or there already; the spare
    rows are in others' steps; or a living process does not let go of the ring's lock."""


class StateLostError(RuntimeError):
    """The sequence's state was overwritten by a step that never committed; reset, load or release it."""
