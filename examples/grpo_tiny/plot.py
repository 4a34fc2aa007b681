"""A run as a picture: a line of blocks for the terminal, and an SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH, HEIGHT, EDGE = 640, 320, 48
COLOURS = ("#2563eb", "#9ca3af", "#d97706")


def sparkline(values: Sequence[float]) -> str:
    return "".join(BLOCKS[min(7, max(0, int(value * 8)))] for value in values)


def svg(runs: Mapping[str, Sequence[float]], *, best: float = 1.0) -> str:
    """The mean reward of each step, one line for each run."""
    steps = max(len(values) for values in runs.values())

    def place(step: float, value: float) -> str:
        x = EDGE + (WIDTH - 2 * EDGE) * step / max(1, steps - 1)
        return f"{x:.1f},{HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * value / best:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        left, right = place(0, tick * best), place(steps - 1, tick * best)
        y = left.split(",")[1]
        parts.append(f'<polyline points="{left} {right}" stroke="#e5e7eb" fill="none"/>')
        parts.append(f'<text x="{EDGE - 8}" y="{y}" text-anchor="end" dominant-baseline="middle">{tick:g}</text>')
    for step in range(0, steps + 1, max(1, steps // 6)):
        x = place(min(step, steps - 1), 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - EDGE + 18}" text-anchor="middle">{step}</text>')
    for number, (name, values) in enumerate(runs.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(place(step, value) for step, value in enumerate(values))
        parts.append(f'<polyline points="{points}" stroke="{colour}" stroke-width="2" fill="none"/>')
        parts.append(f'<text x="{EDGE + 12 + 200 * number}" y="{EDGE - 20}" fill="{colour}">{name}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    return "\n".join([*parts, "</svg>", ""])
