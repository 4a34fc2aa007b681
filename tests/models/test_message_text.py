from typing import Any

import pytest

from paddock.models.message_text import content_text

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hello", "hello"),
        ([{"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"}, "no part"], "ab"),
        ([], ""),
        (None, ""),
    ],
)
def test_the_text_of_a_message(content: Any, text: str) -> None:
    assert content_text(content) == text
