"""Sizes and ages on the command line: `20GB`, `30d`."""

from __future__ import annotations

import re
from typing import Any

import click

from paddock.config import parse_size

AGE_SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


class SizeType(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


class AgeType(click.ParamType[float]):
    """Seconds, from `30d`, `12h`, `90m` or `2w`."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r}: give an age such as 30d, 12h or 90m", param, ctx)
        return float(match[1]) * AGE_SECONDS[match[2]]


def show_size(count: int) -> str:
    """`187 MB`"""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
