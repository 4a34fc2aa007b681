"""Results: one row per comparison, as a table for people and as JSON for programs."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

HEADINGS = ("measure", "unit", "paddock", "openenv", "ratio", "target", "reached")


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: the values of each round, Paddock's and OpenEnv's."""

    measure: str
    unit: str
    paddock: list[float]
    openenv: list[float]
    target: float | None = None
    """The ratio to reach; None for a row that only informs."""

    lower_is_better: bool = False
    limit: float | None = None
    """What Paddock's own value must stay under, where that is the target."""

    generator_cpu_share: float = 0.0
    """The most that the load generator used of a core; near 1.0 it may be the limit itself."""

    @property
    def ratio(self) -> float:
        """How many times better Paddock is: the median of the rounds' own ratios.

        Noise that lasts over a whole round touches both sides and cancels out.
        """
        pairs = zip(self.paddock, self.openenv, strict=True)
        if self.lower_is_better:
            return statistics.median(theirs / ours for ours, theirs in pairs)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None where there is none."""
        if self.limit is not None:
            return statistics.median(self.paddock) < self.limit
        return None if self.target is None else self.ratio >= self.target

    def as_json(self) -> dict[str, Any]:
        medians = {
            "paddock_median": statistics.median(self.paddock),
            "openenv_median": statistics.median(self.openenv),
        }
        return asdict(self) | medians | {"ratio": self.ratio, "reached": self.reached}


def table(rows: list[Row]) -> str:
    """Lay the rows out in columns."""
    lines = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join(_aligned(line, widths) for line in lines)


def _target(row: Row) -> str:
    if row.limit is not None:
        return f"under {row.limit:g}"
    return "-" if row.target is None else f"{row.target:g}x"


def _cells(row: Row) -> tuple[str, ...]:
    target = _target(row)
    return (
        row.measure,
        row.unit,
        _number(statistics.median(row.paddock)),
        _number(statistics.median(row.openenv)),
        f"{row.ratio:.2f}x",
        target,
        {True: "yes", False: "no", None: "-"}[row.reached],
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    words, numbers = 2, len(cells)
    left = [cells[column].ljust(widths[column]) for column in range(words)]
    right = [cells[column].rjust(widths[column]) for column in range(words, numbers)]
    return "  ".join(left + right)
