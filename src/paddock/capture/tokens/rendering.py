"""Messages to token ids and sampled ids to a reply, for one model: a renderer of the package `renderers`.

A family that has no hand-written renderer uses the model's own chat template. Its history is extended by what the
template writes after an assistant message, if that text is found to begin with a special token.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from paddock.config import TIKTOKEN_ENCODINGS_BASE
from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paddock.capture.tokens.tokenizer import TextTokenizer

    Message = dict[str, Any]

Result = TypeVar("Result")
DEFAULT = "default"
RETENTION = "all"
"""Sampled reasoning stays in the history: a conversation whose past is cut would be several samples."""
THINKING = "enable_thinking"
USABLE = ("ok", "unknown_tool")
"""Parsed tool calls that the agent gets as tool calls. It answers a call of an unknown tool itself."""
ODD_VALUE = "invalid_json"
"""With arguments: the format has a text for each, and one text is no value of the declared type."""
PYTHON_WORDS = {"True": True, "False": False, "None": None}
"""Chat templates of such formats write true, false and null like this."""
HARMONY = ("gpt-oss",)
"""Families whose renderer brings a vocabulary of its own, and would download it."""
SENTINELS = ("alpha", "omega")
LATE_NAMES = frozenset(("inkling",))
"""Families that write the name of a tool as text, before the token that begins the call."""
NAMED_RESULTS = frozenset(("gpt-oss", "kimi-k2", "gemma4", "inkling"))
"""Families whose tool results begin with the name of the tool."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """What sampled ids say. `content` has malformed tool calls as text, so that the agent sees them."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    malformed: list[dict[str, str]] = field(default_factory=list)
    """For each tool call that could not be parsed: `status` and `text`."""


class Rendering:
    """Thread-safe. Methods may take long for a long text, so call them on a thread."""

    def __init__(self, renderer: Any, tokenizer: TextTokenizer, family: str) -> None:
        self.family = family
        self.tokenizer = tokenizer
        self.stop_ids: list[int] = list(renderer.get_stop_token_ids())
        self._stops = frozenset(self.stop_ids)
        self._renderer = renderer
        self._texts: dict[int, str] = {}

    def render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        """The ids of a whole conversation, up to where the model continues. Raises ValueError and TypeError."""
        prepared = self._prepare(messages)
        ids: list[int] = self._renderer.render_ids(prepared, tools=tools, add_generation_prompt=True)
        return ids

    def extend(
        self,
        prompt: list[int],
        sampled: list[int],
        answer: Message,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
    ) -> list[int] | None:
        """`prompt`, `sampled` and the ids of the messages that follow the answer. None if there is no exact one."""
        prepared = self._prepare([answer, *messages])[1:]
        if self.family == DEFAULT:
            return self._extend_by_template(prompt, sampled, prepared, tools)
        rendered = self._renderer.bridge_to_next_turn(prompt, sampled, prepared, tools=tools)
        return None if rendered is None else list(rendered.token_ids)

    def parse(self, sampled: list[int], prompt: list[int], tools: list[dict[str, Any]] | None) -> ParsedReply:
        """Never fails: what cannot be parsed is text."""
        ids = self._without_stop(sampled)
        try:
            parsed = self._renderer.parse_response(sampled, prompt_ids=prompt, tools=tools)
        except Exception as error:
            text = self.tokenizer.decode(ids, skip_special_tokens=False)
            problem = {"status": "unparsed", "text": f"{type(error).__name__}: {error}"}
            return ParsedReply(text.strip(), malformed=[problem])
        content, calls, malformed = [parsed.content.strip()], [], []
        for call in parsed.tool_calls:
            status, arguments = str(call.status), call.arguments
            if status == ODD_VALUE and isinstance(arguments, dict):
                # The agent checks the values, as it does with an engine's own parser.
                status, arguments = USABLE[0], _read_words(arguments, _declared(call.name, tools))
            if call.name and status in USABLE:
                calls.append(_tool_call(call, arguments))
                continue
            span = call.token_span
            text = call.raw if span is None else self.tokenizer.decode(ids[span[0] : span[1]])
            malformed.append({"status": status, "text": text})
            content.append(text.strip())
        text = "\n".join(part for part in content if part)
        return ParsedReply(text, (parsed.reasoning_content or "").strip(), calls, malformed)

    async def run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Call one of these methods for a short text: on a thread only if it has to wait for the event loop."""
        return await asyncio.to_thread(work, *arguments) if self.tokenizer.is_remote else work(*arguments)

    def texts(self, ids: Iterable[int]) -> list[str]:
        """The text of each token."""
        for token in ids:
            if token not in self._texts:
                self._texts[token] = self.tokenizer.decode([token])
        return [self._texts[token] for token in ids]

    def _without_stop(self, ids: list[int]) -> list[int]:
        end = next((index for index, token in enumerate(ids) if token in self._stops), len(ids))
        return ids[:end]

    def _prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in the form that chat templates have in common: plain texts, and no role `developer`."""
        names: dict[str, str] = {}
        prepared = []
        for message in messages:
            result = {name: value for name, value in message.items() if value is not None}
            result["content"] = plain_text(message.get("content"))
            if result.get("role") == "developer":
                result["role"] = "system"
            for call in result.get("tool_calls") or ():
                names[str(call.get("id"))] = str((call.get("function") or {}).get("name"))
            if result.get("role") == "tool" and self.family in NAMED_RESULTS and "name" not in result:
                result |= {"name": names[call_id]} if (call_id := str(result.get("tool_call_id"))) in names else {}
            prepared.append(result)
        return prepared

    def _extend_by_template(
        self, prompt: list[int], sampled: list[int], messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> list[int] | None:
        if not messages or any(message["role"] == "assistant" for message in messages):
            return None
        endings = set()
        for sentinel in SENTINELS:
            history = [{"role": "user", "content": "-"}, {"role": "assistant", "content": sentinel}]
            text = self._renderer_text([*history, *messages], tools)
            endings.add(None if text is None else text.partition(sentinel)[2])
        ending = endings.pop()
        if ending is None or endings:
            return None
        ids = self.tokenizer.encode(ending)
        if not ids or ids[0] not in self._stops:
            return None
        if sampled and sampled[-1] in self._stops:
            ids = ids[1:] if sampled[-1] == ids[0] else []
        return [*prompt, *sampled, *ids] if ids else None

    def _renderer_text(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> str | None:
        options = {} if tools is None else {"tools": tools}
        options |= self._renderer.config.model_extra or {}
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **options
            )
        except Exception:
            # The template takes no such history: then there is no exact extension.
            return None
        return text


def open_rendering(tokenizer: TextTokenizer, *, family: str | None, model: str, thinking: bool | None) -> Rendering:
    """The rendering of a model. `family` is a name of `renderers`; None: by the model's name, else its template.

    Raises ConfigError for an unknown family, or one whose special tokens the tokenizer lacks."""
    from renderers.base import MODEL_RENDERER_MAP, RENDERER_REGISTRY, _populate_registry
    from renderers.configs import _config_class_for

    _populate_registry()
    names = (tokenizer.name_or_path, model)
    family = family or next((MODEL_RENDERER_MAP[name] for name in names if name in MODEL_RENDERER_MAP), DEFAULT)
    if family not in RENDERER_REGISTRY:
        raise ConfigError(f"there is no renderer {family!r}", hint=f"use {', '.join(sorted(RENDERER_REGISTRY))}")
    if family in HARMONY and TIKTOKEN_ENCODINGS_BASE.read() is None:
        raise ConfigError(
            f"the renderer {family} needs the vocabulary o200k_base, and nothing is downloaded",
            hint="put o200k_base.tiktoken into a folder and set TIKTOKEN_ENCODINGS_BASE to it",
        )
    options: dict[str, Any]
    if family == DEFAULT:
        if tokenizer.chat_template is None:
            hint = "name its family as renderer, such as qwen3, or give a tokenizer with a chat template"
            raise ConfigError(f"{model} has no known renderer, and its tokenizer no chat template", hint=hint)
        options = _find_parsers(tokenizer)
    else:
        options = {"thinking_retention": RETENTION}
    config_class = _config_class_for(family)
    takes_thinking = family == DEFAULT or THINKING in config_class.template_field_names()
    if thinking is not None and takes_thinking:
        options[THINKING] = thinking
    try:
        renderer = RENDERER_REGISTRY[family](tokenizer, config_class(**options))
    except Exception as error:
        raise ConfigError(
            f"the renderer {family} cannot be used with the tokenizer {tokenizer.name_or_path}: {error}",
            hint="name the family of the model as renderer, or `default` for its own chat template",
        ) from None
    return Rendering(renderer, tokenizer, family)


def is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def plain_text(content: Any) -> str:
    """The text of a message's content, its parts joined as inference engines do it."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    return "\n".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in parts)


def _find_parsers(tokenizer: TextTokenizer) -> dict[str, Any]:
    """Parsers for a template of the common form: tool calls between two special tokens."""
    template = tokenizer.chat_template or ""
    parsers: dict[str, Any] = {}
    if "<tool_call>" in template and isinstance(tokenizer.convert_tokens_to_ids("<tool_call>"), int):
        parsers["tool_parser"] = "qwen3.5" if "<function=" in template else "qwen3"
    if "</think>" in template:
        parsers["reasoning_parser"] = "think"
    return parsers


def _declared(name: str | None, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The schemas of a tool's parameters; empty if there are none."""
    functions = [tool.get("function") or tool for tool in tools or ()]
    parameters = next((each.get("parameters") for each in functions if each.get("name") == name), None)
    return (parameters or {}).get("properties") or {}


def _read_words(arguments: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """The arguments with Python's words as values, where the declared type is no text."""
    read = dict(arguments)
    for name, value in arguments.items():
        kinds = (schemas.get(name) or {}).get("type")
        if isinstance(value, str) and value in PYTHON_WORDS and kinds and "string" not in kinds:
            read[name] = PYTHON_WORDS[value]
    return read


def _tool_call(call: Any, arguments: Any) -> dict[str, Any]:
    arguments = {} if arguments is None else arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not is_utf8(text):
        # A model may write half of a surrogate pair as an escape. It can be sent as an escape only.
        text = json.dumps(arguments)
    function = {"name": call.name, "arguments": text}
    return {"id": call.id or f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
