"""The text of a message of a chat, whose content is a text or a list of parts."""

from __future__ import annotations

from typing import Any


def content_text(content: Any) -> str:
    """A text, or the texts of a list of parts joined. Parts of other kinds, such as images, have none."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
