"""A model's tokenizer on this machine, in the form that the package `renderers` takes.

Sources: a folder with `tokenizer.json`, a GGUF file, or a name in Hugging Face's local cache. Nothing is downloaded.
`engine_tokenizer` has the other source, the endpoint of an inference engine.
"""

from __future__ import annotations

import importlib.util
import json
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from paddock.capture.tokens.chat_template import compile_template
from paddock.capture.tokens.gguf import build_tokenizer, read_metadata
from paddock.distribution import install_command
from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PACKAGES = ("renderers", "tokenizers", "httpx")
TOKENIZER_FILE = "tokenizer.json"
HINT = "give a folder with tokenizer.json, a GGUF file, a name in Hugging Face's local cache, or `engine`"


class TextTokenizer(ABC):
    """What a renderer needs. Text is encoded with the special tokens in it, and none is added."""

    is_remote: ClassVar[bool] = False
    """Its methods wait for the event loop, so they must be called on a thread."""

    def __init__(
        self, name: str, *, template: str | None = None, bos: str | None = None, eos: str | None = None
    ) -> None:
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.chat_template = template
        self.all_special_tokens: list[str] = []
        self.bos_token, self.eos_token = bos, eos
        self._render: Callable[..., str] | None = None

    @property
    def eos_token_id(self) -> int | None:
        token = None if self.eos_token is None else self.convert_tokens_to_ids(self.eos_token)
        return token if isinstance(token, int) else None

    @abstractmethod
    def encode(self, text: str, **options: Any) -> list[int]:
        """The ids of a text."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int] | int, **options: Any) -> str:
        """The text of ids, special tokens included."""

    @abstractmethod
    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or None; for a list, the list of them."""

    def apply_chat_template(self, messages: list[Any], *, tokenize: bool = True, **options: Any) -> Any:
        """The text of the messages, or its ids. Raises ConfigError without a template."""
        options.pop("return_dict", None)
        if self._render is None:
            if self.chat_template is None:
                raise ConfigError(f"the tokenizer {self.name_or_path} has no chat template", hint="name a renderer")
            self._render = compile_template(self.chat_template)
        text = self._render(
            messages=messages, bos_token=self.bos_token or "", eos_token=self.eos_token or "", **options
        )
        return self.encode(text) if tokenize else text


class FastTokenizer(TextTokenizer):
    """A tokenizer of the package `tokenizers`."""

    def __init__(self, backend: Any, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self._backend = backend
        added = backend.get_added_tokens_decoder().values()
        self.all_special_tokens = [token.content for token in added if token.special]

    def encode(self, text: str, **options: Any) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int] | int, *, skip_special_tokens: bool = False, **options: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._backend.token_to_id(tokens)
        return [self._backend.token_to_id(token) for token in tokens]


def check_installed() -> None:
    """Raises ConfigError if a package that token mode needs is missing."""
    if any(importlib.util.find_spec(name) is None for name in PACKAGES):
        raise ConfigError("token mode needs the package renderers", hint=install_command("tokens"))


def open_tokenizer(source: str) -> FastTokenizer:
    """The tokenizer of a folder, a GGUF file or a cached name. Raises ConfigError that says what to give."""
    check_installed()
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return open_gguf(path)
    if path.is_dir():
        return open_folder(path, source)
    if (folder := find_cached(source)) is not None:
        return open_folder(folder, source)
    hint = HINT
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", source):
        hint = f"`hf download {source} tokenizer.json tokenizer_config.json` puts it into the cache; or {HINT}"
    raise ConfigError(f"there is no tokenizer {source!r} on this machine", hint=hint)


def open_gguf(path: Path) -> FastTokenizer:
    metadata = read_metadata(path)
    backend = build_tokenizer(metadata, path)

    def text_of(name: str) -> str | None:
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return backend.id_to_token(token) if isinstance(token, int) else None

    return FastTokenizer(
        backend, path.stem, template=metadata.get("tokenizer.chat_template"), bos=text_of("bos"), eos=text_of("eos")
    )


def open_folder(folder: Path, name: str) -> FastTokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(folder / TOKENIZER_FILE))
    except Exception as error:
        raise ConfigError(f"{folder / TOKENIZER_FILE} cannot be opened: {error}", hint=HINT) from None
    settings = _read_settings(folder)
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text() if template_file.is_file() else _template_of(settings)
    return FastTokenizer(
        backend, name, template=template, bos=_token_text(settings, "bos"), eos=_token_text(settings, "eos")
    )


def find_cached(name: str) -> Path | None:
    """The folder of a Hugging Face model whose tokenizer was downloaded before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, TOKENIZER_FILE)
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None


def _read_settings(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    except OSError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{folder / 'tokenizer_config.json'} is no JSON: {error}", hint=HINT) from None
    return settings if isinstance(settings, dict) else {}


def _template_of(settings: dict[str, Any]) -> str | None:
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(settings: dict[str, Any], name: str) -> str | None:
    token = settings.get(f"{name}_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
