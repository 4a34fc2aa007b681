"""The metadata of a GGUF file, and the byte-level BPE tokenizer that it describes.

The tensors are not read. Only pre-tokenizers whose rules are known exactly are opened: a tokenizer that splits a text
in another way than the engine's would be wrong without a sign of it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, BinaryIO

from paddock.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MAGIC = b"GGUF"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are whole in a text: markers of the chat template, and additions to the vocabulary."""
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SPLITS = {
    "qwen2": rf"{ENDINGS}|{WORDS}|\p{{N}}|{REST}",
    "deepseek-r1-qwen": rf"{ENDINGS}|{WORDS}|\p{{N}}|{REST}",
    "llama-bpe": rf"{ENDINGS}|{WORDS}|\p{{N}}{{1,3}}|{REST}",
    "llama3": rf"{ENDINGS}|{WORDS}|\p{{N}}{{1,3}}|{REST}",
}
"""The expression that splits a text, by the name of the pre-tokenizer."""
SINGLE_DIGITS = ("smollm", "starcoder", "codeshell", "refact", "command-r")
"""GPT-2's split, after every digit was split off."""
PLAIN = ("default", "gpt-2", "gpt2")
NEEDED = {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"}
HINT = "give the folder of its tokenizer.json as tokenizer, or `engine` to use the inference engine's tokenizer"


def read_metadata(path: Path) -> dict[str, Any]:
    """All metadata of the file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            magic, version = file.read(4), _read(file, "I")
            if magic != MAGIC or version < 2:
                raise ConfigError(f"{path} is no GGUF file", hint="give weights in the GGUF format")
            _, count = _read(file, "Q"), _read(file, "Q")
            return {_read_string(file): _read_value(file, _read(file, "I")) for _ in range(count)}
    except (OSError, struct.error, UnicodeDecodeError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="check that the file is whole") from None


def build_tokenizer(metadata: dict[str, Any], path: Path) -> Any:
    """A `tokenizers.Tokenizer`. Raises ConfigError for a kind of tokenizer that cannot be rebuilt exactly."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    model, split = metadata.get("tokenizer.ggml.model"), str(metadata.get("tokenizer.ggml.pre", "default"))
    if model != "gpt2" or split not in (*SPLITS, *SINGLE_DIGITS, *PLAIN) or NEEDED - metadata.keys():
        raise ConfigError(f"the tokenizer of {path.name} ({model}, {split}) cannot be read from it", hint=HINT)
    texts: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    ignores_merges = split in ("llama-bpe", "llama3")
    bpe = models.BPE({text: token for token, text in enumerate(texts)}, merges, ignore_merges=ignores_merges)
    tokenizer = Tokenizer(bpe)
    if split in SPLITS:
        if split in ("qwen2", "deepseek-r1-qwen"):
            tokenizer.normalizer = normalizers.NFC()
        parts = [
            pre_tokenizers.Split(Regex(SPLITS[split]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if split in SINGLE_DIGITS else []
        parts = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    whole = [(text, kind) for text, kind in zip(texts, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text, kind in whole if kind == CONTROL]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text, kind in whole if kind == USER_DEFINED])
    return tokenizer


def _read(file: BinaryIO, form: str) -> Any:
    return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))[0]


def _read_string(file: BinaryIO) -> str:
    size: int = _read(file, "Q")
    return file.read(size).decode()


def _read_value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _read_string(file)
    if kind != ARRAY:
        return _read(file, SCALARS[kind])
    inner, count = _read(file, "I"), _read(file, "Q")
    if inner in (STRING, ARRAY):
        return [_read_value(file, inner) for _ in range(count)]
    form = f"<{count}{SCALARS[inner]}"
    return list(struct.unpack(form, file.read(struct.calcsize(form))))
