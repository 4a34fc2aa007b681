"""JSON as models write it: integers of any length, and strings with lone surrogates.

orjson and pydantic are tried first because they are fast; the standard library accepts what they refuse.
"""

from __future__ import annotations

import json
from typing import Any

import orjson
from pydantic_core import from_json


def encode_any(document: Any) -> bytes:
    """Raises ValueError for what JSON cannot express."""
    try:
        return orjson.dumps(document)
    except TypeError:
        try:
            return json.dumps(document, allow_nan=False).encode()
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error


def decode_any(text: bytes | str) -> Any:
    """Raises ValueError for what is not JSON."""
    try:
        return from_json(text)
    except ValueError:
        try:
            return json.loads(text)
        except RecursionError as error:
            raise ValueError(str(error)) from error
