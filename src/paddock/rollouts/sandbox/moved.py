"""Paths that are somewhere else than they should be, and texts that name them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Moved:
    """Rewrites each path in a text to where it is. What lies below `keep` was rewritten before, and stays."""

    def __init__(self, places: Mapping[str, str], *, keep: str) -> None:
        self._places = dict(places)
        names = "|".join(re.escape(path) for path in sorted(places, key=len, reverse=True))
        # The place itself comes first and stays: what was rewritten once is not rewritten again.
        self._path = re.compile(rf"{re.escape(keep)}|(?<![\w./~-])(?:{names})(?![\w.-])")

    def localize(self, text: str) -> str:
        if not self._places:
            return text
        return self._path.sub(lambda found: self._places.get(found[0], found[0]), text)
