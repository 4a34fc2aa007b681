"""What a replay plays: a script or a recording, read from a file and checked.

Nothing here knows HTTP or tokens' ids. The format is described in `paddock.testing.replay`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from paddock.errors import ConfigError
from paddock.testing.replay.format import ScriptFile
from paddock.testing.replay.template import Said, first_user_text, said_in, turns_taken

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.testing.replay.format import Engine, Fault


@dataclass(frozen=True, slots=True)
class Recorded:
    """A call of an earlier rollout, to be answered again with exactly its ids and logprobs."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    tokens: list[str]
    message: dict[str, Any]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class ScriptedTask:
    """The turns for the conversations that it is for."""

    when: str
    turns: Mapping[int, Said | Recorded]

    def turn(self, number: int) -> Said | Recorded:
        """What to answer in a turn. Past the last one, its text again."""
        if number in self.turns:
            return self.turns[number]
        last = self.turns[max(self.turns)]
        text = last.text if isinstance(last, Said) else str(last.message.get("content") or "")
        return Said(text or "Done.")

    @property
    def uses_tools(self) -> bool:
        return any(
            turn.calls if isinstance(turn, Said) else turn.message.get("tool_calls") for turn in self.turns.values()
        )


@dataclass(frozen=True, slots=True)
class Script:
    """All that a replay server plays."""

    tasks: tuple[ScriptedTask, ...]
    faults: tuple[Fault, ...] = ()
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
                recorded.append(_recording(document, name, alone=len(documents) == 1))
            elif "turns" in document:
                short = dict(document)
                tasks.append({"when": short.pop("when", ""), "turns": short.pop("turns")})
                options.update(short)
            else:
                options.update(document)
        try:
            file = ScriptFile.model_validate({**options, "tasks": [*options.get("tasks", ()), *tasks]})
        except (ValidationError, TypeError) as error:
            raise ConfigError(f"{name} is not a script: {_first(error)}", hint=HINT) from None
        scripted = [
            ScriptedTask(task.when, {number: turn.said() for number, turn in enumerate(task.turns)})
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


HINT = 'write {"turns": [{"tool": "bash", "arguments": {"command": "ls"}}, {"text": "Done."}]}, or give a recording'


def _documents(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as whole:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            raise ConfigError(f"{name} is not JSON: {whole}", hint=HINT) from None


def _first(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return str(error)
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


def _recording(document: dict[str, Any], name: str, *, alone: bool) -> ScriptedTask:
    """The agent's calls of a recorded rollout, by the turn that each was in."""
    turns: dict[int, Said | Recorded] = {}
    when: str | None = None
    calls = document["calls"]
    if not isinstance(calls, list):
        raise ConfigError(f"{name} has `calls` that are no list", hint=HINT)
    for call in calls:
        if not isinstance(call, dict) or call.get("role", "agent") != "agent" or not call.get("message"):
            continue
        messages = _messages(call)
        number = turns_taken(messages) if isinstance(messages, list) else len(turns)
        if when is None and isinstance(messages, list):
            when = first_user_text(messages)
        turns.setdefault(number, _recorded_turn(call))
    if not turns:
        raise ConfigError(f"{name} holds no call of an agent that was answered", hint="record a rollout again")
    return ScriptedTask("" if alone else when or "", turns)


def _messages(call: dict[str, Any]) -> Any:
    """What the agent had sent, in whatever dialect it spoke."""
    from paddock.rollouts.capture.dialects import DIALECTS
    from paddock.rollouts.capture.refusals import BadRequest

    dialect = DIALECTS.get(str(call.get("dialect", "chat")))
    request = call.get("request")
    if dialect is None or not isinstance(request, dict):
        return None
    try:
        return dialect().chat_form(request).get("messages")
    except BadRequest:
        return None


def _recorded_turn(call: dict[str, Any]) -> Said | Recorded:
    ids, logprobs = call.get("completion_token_ids") or [], call.get("logprobs") or []
    if not ids or len(ids) != len(logprobs):
        return said_in(call["message"])
    tokens = call.get("tokens") or []
    reason = call.get("finish_reason") or ("tool_calls" if call["message"].get("tool_calls") else "stop")
    return Recorded(
        prompt_ids=call.get("prompt_token_ids") or [],
        completion_ids=ids,
        logprobs=logprobs,
        tokens=tokens if len(tokens) == len(ids) else [""] * len(ids),
        message=call["message"],
        finish_reason=reason,
    )
