"""A row of the table, and how one is written down."""

from dataclasses import dataclass

ROWS = {}


@dataclass
class Row:
    name: str
    what: str
    target: float
    stretch: float | None
    at_least: bool          # larger is better
    unit: str
    level: str | None       # GDN_LEVEL of the row's process; None = the machine's best
    measure: object

    def verdict(self, value):
        def met(bound):
            return bound is not None and (value >= bound if self.at_least else value <= bound)
        return "stretch" if met(self.stretch) else "pass" if met(self.target) else "MISS"


def row(name, what, *, target, stretch=None, at_least, unit="x", level=None):
    def register(measure):
        ROWS[name] = Row(name, what, target, stretch, at_least, unit, level, measure)
        return measure
    return register


def times(p, **more):
    """A comparison's parts, in microseconds, as details of a row."""
    return {"a_us": round(p.a * 1e6, 2), "b_us": round(p.b * 1e6, 2), "pairs": p.n, **more}
