"""What a replay plays: a script or a recording, read from a file and checked.

`ScriptFile` and the models in it are the file format, which `paddock.models.replay` describes; `Script` is what the
server plays. Nothing here knows HTTP or token ids.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paddock.errors import ConfigError
from paddock.models.replay.tokenizer import (
    AssistantTurn,
    ScriptedToolCall,
    assistant_turn_of,
    canonical_arguments,
    count_turns,
    opening_texts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

Engine = Literal["vllm", "sglang", "llamacpp", "openai", "text"]
HINT = 'write {"turns": [{"tool": "bash", "arguments": {"command": "ls"}}, {"text": "Done."}]}, or give a recording'


# -- the file format ----------------------------------------------------------------------------------


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScriptedCall(StrictModel):
    tool: str = Field(min_length=1)
    arguments: dict[str, Any] = Field(default_factory=dict)


class ScriptedTurn(StrictModel):
    """What the model answers in one turn."""

    tool: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    tools: list[ScriptedCall] = Field(default_factory=list)
    text: str = ""
    thinking: str = ""

    @model_validator(mode="after")
    def _check_not_empty(self) -> ScriptedTurn:
        if self.tool is None and not self.tools and not self.text:
            raise ValueError("a turn needs `tool`, `tools` or `text`")
        if self.arguments and self.tool is None:
            raise ValueError("`arguments` needs `tool`")
        return self

    def to_assistant_turn(self) -> AssistantTurn:
        calls = [ScriptedCall(tool=self.tool, arguments=self.arguments)] if self.tool else []
        calls += self.tools
        return AssistantTurn(
            self.text.strip(),
            self.thinking.strip(),
            tuple(ScriptedToolCall(call.tool, canonical_arguments(call.arguments)) for call in calls),
        )


class ScriptedFault(StrictModel):
    """A failure to inject into an answer."""

    when: str = ""
    """Only in conversations whose opening, the messages of the user before the first answer, contains this."""
    turn: int | None = Field(default=None, ge=0)
    """Only in this turn. None: in any."""
    times: int | None = Field(default=None, ge=1)
    """How often in one conversation. Left out: once, and every time if it only slows the answer down."""

    status: int | None = Field(default=None, ge=400, le=599)
    code: str | None = None
    message: str = "scripted fault"
    retry_after: float | None = None
    cut_after: int | None = Field(default=None, ge=0)
    stall_after: int | None = Field(default=None, ge=0)
    error_chunk: str | None = None
    close: bool = False
    malformed: bool = False
    hang: float | None = Field(default=None, gt=0)
    delay: float | None = Field(default=None, gt=0)
    per_token_delay: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check_not_empty(self) -> ScriptedFault:
        if not self.breaks and self.hang is None and self.delay is None and self.per_token_delay is None:
            raise ValueError("a fault needs an effect, such as `status` or `cut_after`")
        return self

    @property
    def breaks(self) -> bool:
        ended = self.status is not None or self.cut_after is not None or self.error_chunk is not None
        return ended or self.stall_after is not None or self.close or self.malformed

    @property
    def limit(self) -> int | None:
        """How often it happens in one conversation; None is every time."""
        return self.times or (1 if self.breaks or self.hang is not None else None)


class TaskTurns(StrictModel):
    """The turns for the conversations whose instruction contains `when`."""

    when: str = ""
    turns: list[ScriptedTurn] = Field(min_length=1)


class ScriptFile(StrictModel):
    """A whole script, as it is written in a file."""

    model: str = Field(default="replay", min_length=1)
    engine: Engine = "vllm"
    seed: int = 0
    max_context: int | None = Field(default=None, ge=1)
    tokens_per_chunk: int = Field(default=1, ge=1)
    weight_version: str | None = None
    rejects: list[str] = Field(default_factory=list)
    tasks: list[TaskTurns] = Field(default_factory=list)
    faults: list[ScriptedFault] = Field(default_factory=list)


# -- what is played ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A call of an earlier rollout, to be answered again with exactly its ids and logprobs."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    tokens: list[str]
    message: dict[str, Any]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class ScriptedTask:
    """The turns of the conversations whose opening contains `when`."""

    when: str
    turns: Mapping[int, AssistantTurn | RecordedTurn]

    def turn(self, number: int) -> AssistantTurn | RecordedTurn:
        """What to answer in a turn. Past the last one, its text again."""
        if number in self.turns:
            return self.turns[number]
        last = self.turns[max(self.turns)]
        text = last.text if isinstance(last, AssistantTurn) else str(last.message.get("content") or "")
        return AssistantTurn(text or "Done.")

    @property
    def uses_tools(self) -> bool:
        return any(
            turn.calls if isinstance(turn, AssistantTurn) else turn.message.get("tool_calls")
            for turn in self.turns.values()
        )


@dataclass(frozen=True, slots=True)
class Script:
    """All that a replay server plays."""

    tasks: tuple[ScriptedTask, ...]
    faults: tuple[ScriptedFault, ...] = ()
    model: str = "replay"
    engine: Engine = "vllm"
    seed: int = 0
    max_context: int | None = None
    tokens_per_chunk: int = 1
    weight_version: str | None = None
    rejects: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def load(cls, path: str | Path) -> Script:
        """Read a file. Raises ConfigError if it is not there or not a script."""
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}", hint="give the path of a script or recording"
            ) from None
        return cls.parse(_documents(text, str(path)), name=str(path))

    @classmethod
    def parse(cls, content: Any, *, name: str = "the script") -> Script:
        """Make a script of what a file holds: an object, or a list of the lines of a JSONL file."""
        documents = content if isinstance(content, list) else [content]
        options: dict[str, Any] = {}
        tasks: list[dict[str, Any]] = []
        recorded: list[ScriptedTask] = []
        for document in documents:
            if not isinstance(document, dict):
                raise ConfigError(f"{name} holds {type(document).__name__}, not an object", hint=HINT)
            if "calls" in document:
                recorded.append(_read_recording(document, name, alone=len(documents) == 1))
            elif "turns" in document:
                rest = dict(document)
                tasks.append({"when": rest.pop("when", ""), "turns": rest.pop("turns")})
                options.update(rest)
            else:
                options.update(document)
        try:
            file = ScriptFile.model_validate({**options, "tasks": [*options.get("tasks", ()), *tasks]})
        except (ValidationError, TypeError) as error:
            raise ConfigError(f"{name} is not a script: {_first_problem(error)}", hint=HINT) from None
        scripted = [
            ScriptedTask(task.when, {number: turn.to_assistant_turn() for number, turn in enumerate(task.turns)})
            for task in file.tasks
        ]
        if not scripted and not recorded:
            raise ConfigError(f"{name} has no turns", hint=HINT)
        return cls(
            tasks=(*scripted, *recorded),
            faults=tuple(file.faults),
            model=file.model,
            engine=file.engine,
            seed=file.seed,
            max_context=file.max_context,
            tokens_per_chunk=file.tokens_per_chunk,
            weight_version=file.weight_version,
            rejects=frozenset(file.rejects),
        )


def _documents(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as whole:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            raise ConfigError(f"{name} is not JSON: {whole}", hint=HINT) from None


def _first_problem(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return str(error)
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


def _read_recording(document: dict[str, Any], name: str, *, alone: bool) -> ScriptedTask:
    """The agent's calls of a recorded rollout, by turn."""
    turns: dict[int, AssistantTurn | RecordedTurn] = {}
    when: str | None = None
    calls = document["calls"]
    if not isinstance(calls, list):
        raise ConfigError(f"{name} has `calls` that are no list", hint=HINT)
    for call in calls:
        if not isinstance(call, dict) or call.get("role", "agent") != "agent" or not call.get("message"):
            continue
        messages = _messages(call)
        number = count_turns(messages) if isinstance(messages, list) else len(turns)
        if when is None and isinstance(messages, list):
            when = next(reversed(opening_texts(messages)), "")
        turns.setdefault(number, _recorded_turn(call))
    if not turns:
        raise ConfigError(f"{name} holds no call of an agent that was answered", hint="record a rollout again")
    return ScriptedTask("" if alone else when or "", turns)


def _messages(call: dict[str, Any]) -> Any:
    """The request as chat messages: exports add them as `chat` if the request has another dialect."""
    request = call.get("chat") or call.get("request")
    return request.get("messages") if isinstance(request, dict) else None


def _recorded_turn(call: dict[str, Any]) -> AssistantTurn | RecordedTurn:
    ids, logprobs = call.get("completion_token_ids") or [], call.get("logprobs") or []
    if not ids or len(ids) != len(logprobs):
        return assistant_turn_of(call["message"])
    tokens = call.get("tokens") or []
    reason = call.get("finish_reason") or ("tool_calls" if call["message"].get("tool_calls") else "stop")
    return RecordedTurn(
        prompt_ids=call.get("prompt_token_ids") or [],
        completion_ids=ids,
        logprobs=logprobs,
        tokens=tokens if len(tokens) == len(ids) else [""] * len(ids),
        message=call["message"],
        finish_reason=reason,
    )
