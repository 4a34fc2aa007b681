"""Importing renderers and training the tokenizer take seconds, which must not count for the deadline of a test."""

import pytest

from capture.tokens.harness import tokenizer_folder
from paddock.capture.tokens.rendering import open_rendering
from paddock.capture.tokens.tokenizer import open_tokenizer


@pytest.fixture(scope="session", autouse=True)
def _prepared() -> None:
    open_rendering(open_tokenizer(tokenizer_folder()), family="qwen3", model="model", thinking=None)
