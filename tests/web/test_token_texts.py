"""Texts of tokens from the tokenizer of the model."""

from pathlib import Path

import pytest

from paddock.models.gguf_files import models_folder
from paddock.models.local import find_default_weights
from paddock.models.replay.tokenizer import decode, encode
from paddock.web.token_texts import decode_tokens, open_decoder

IDS = encode("some words")
KNOWN = {IDS[0]: decode(IDS[:1])}


@pytest.mark.parametrize("model", ["demo", "replay:script.json"])
def test_tokens_of_the_replay_model_are_decoded(model: str) -> None:
    assert "".join(decode_tokens(model, IDS, KNOWN).values()) == "some words"


def test_a_tokenizer_that_contradicts_the_sampled_texts_is_not_used() -> None:
    assert decode_tokens("replay:recording.jsonl", IDS, {IDS[0]: "other"}) == {}


def test_nothing_is_decoded_without_a_text_to_compare() -> None:
    assert decode_tokens("demo", IDS, {}) == {}


def test_a_part_of_a_character_has_no_text() -> None:
    assert decode_tokens("demo", [0xC3], KNOWN) == {}


def test_a_local_model_is_decoded_with_its_file() -> None:
    assert find_default_weights(models_folder()) is not None
    decoder = open_decoder("local")
    assert decoder is not None
    assert decoder(1) == "<|im_start|>"


@pytest.mark.parametrize("model", ["local:/nowhere.gguf", "http://127.0.0.1:8000/v1"])
def test_a_tokenizer_that_is_elsewhere_decodes_nothing(model: str, tmp_path: Path) -> None:
    assert open_decoder(model) is None
