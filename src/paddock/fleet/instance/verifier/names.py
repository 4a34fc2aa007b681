"""Helpers that verifiers call by name: loose comparison of text and numbers."""

from __future__ import annotations

import json
import re
import string
from typing import Any

_SPACES = str.maketrans(dict.fromkeys(string.punctuation, " "))
_NUMBER = re.compile(r"-?\d+\.?\d*")


def normalized_contains(target: str, blob: Any) -> bool:
    """Whether `target` is in `blob`, apart from case, punctuation and spaces."""
    return _normalized(target) in _normalized(blob)


def normalized_string_comparison(target: str, blob: Any) -> bool:
    """Whether `target` is `blob`, apart from case, punctuation and spaces."""
    return _normalized(target) == _normalized(blob)


def extract_numbers(text: Any) -> list[float]:
    """Every number in a text; commas inside numbers do not matter."""
    return [float(found) for found in _NUMBER.findall(str(text).replace(",", ""))]


def contains_number(text: Any, target_number: Any) -> bool:
    """Whether one of the numbers in `text` is `target_number`."""
    try:
        wanted = float(str(target_number).replace(",", ""))
    except ValueError:
        return False
    return wanted in extract_numbers(text)


def _normalized(value: Any) -> str:
    text = json.dumps(value, sort_keys=True) if isinstance(value, (dict, list)) else str(value)
    return "".join(text.lower().translate(_SPACES).split())
