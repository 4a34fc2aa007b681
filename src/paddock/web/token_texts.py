"""The texts of tokens that were never sampled, such as those of prompts.

Engines report texts of sampled tokens only. For a model whose tokenizer is on this machine, the page decodes the
others, if the tokenizer agrees with the texts that were reported.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from paddock.errors import ConfigError
from paddock.models.catalog import DEMO
from paddock.models.gguf_files import find_gguf, models_folder
from paddock.models.local import find_default_weights
from paddock.models.replay.tokenizer import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Decoder = Callable[[int], str]

LOCAL = "local"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for a token that is a part of a character."""


def decode_tokens(model: str, ids: Iterable[int], sampled: Mapping[int, str]) -> dict[int, str]:
    """The texts of ids, as far as the model's tokenizer is here and agrees with the texts that were sampled."""
    decoder = open_decoder(model) if sampled else None
    if decoder is None or not all(is_same(decoder, token, text) for token, text in sampled.items()):
        return {}
    texts = {token: read_text(decoder, token) for token in ids}
    return {token: text for token, text in texts.items() if text is not None}


def is_same(decoder: Decoder, token: int, text: str) -> bool:
    decoded = read_text(decoder, token)
    # A part of a character has no text of its own; engines report it with a neighbour.
    return decoded is None or not text or decoded == text


def read_text(decoder: Decoder, token: int) -> str | None:
    try:
        text = decoder(token)
    except (ValueError, OverflowError):
        return None
    return None if not text or REPLACEMENT in text else text


@lru_cache(maxsize=4)
def open_decoder(model: str) -> Decoder | None:
    """Decodes one token of a model that is named as in `--model`. None where the tokenizer is not on this machine."""
    kind, _, rest = model.partition(":")
    if kind in (DEMO, "replay"):
        return lambda token: decode([token])
    if kind != LOCAL:
        return None
    from paddock.capture.tokens.tokenizer import open_tokenizer

    try:
        weights = find_gguf(rest) if rest else find_default_weights(models_folder())
        if weights is None:
            return None
        tokenizer = open_tokenizer(str(weights))
    except ConfigError:
        return None
    return lambda token: tokenizer.decode([token])
