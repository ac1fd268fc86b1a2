"""Drafts without a second model: what followed the last time the same bytes were written (prompt lookup)."""

LONGEST, SHORTEST = 12, 4          # how many bytes must have been written before


def draft(text, n):
    """Up to n bytes that may follow `text` (bytes or bytearray), b"" if its end is new."""
    for length in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -4):
        at = text.rfind(text[-length:], 0, len(text) - 1)
        if at >= 0:
            return bytes(text[at + length:at + length + n])
    return b""


class DraftLength:
    """How many tokens are worth drafting for one sequence: grows while they are right, pauses when they are not."""

    def __init__(self, most):
        self.most, self.length, self.pause = most, min(2, most), 0

    def next(self):
        if self.pause:
            self.pause -= 1
            return 0
        return self.length

    def record(self, drafted, accepted):
        if accepted == drafted:
            self.length = min(self.most, 2 * self.length)
        elif accepted == 0:
            self.pause = 4 if self.length <= 1 else 0
            self.length = max(min(1, self.most), self.length // 2)
