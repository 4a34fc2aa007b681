"""The format of a script file as checked models. What a script means is in `paddock.testing.replay`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paddock.testing.replay.template import Said, ToolCall, canonical_arguments

Engine = Literal["vllm", "sglang", "llamacpp", "openai", "text"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScriptedCall(_Strict):
    tool: str = Field(min_length=1)
    arguments: dict[str, Any] = Field(default_factory=dict)


class Turn(_Strict):
    """What the model answers in one turn."""

    tool: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    tools: list[ScriptedCall] = Field(default_factory=list)
    text: str = ""
    thinking: str = ""

    @model_validator(mode="after")
    def _says_something(self) -> Turn:
        if self.tool is None and not self.tools and not self.text:
            raise ValueError("a turn needs `tool`, `tools` or `text`")
        if self.arguments and self.tool is None:
            raise ValueError("`arguments` needs `tool`")
        return self

    def said(self) -> Said:
        calls = [ScriptedCall(tool=self.tool, arguments=self.arguments)] if self.tool else []
        wanted = (*calls, *self.tools)
        return Said(
            self.text.strip(),
            self.thinking.strip(),
            tuple(ToolCall(call.tool, canonical_arguments(call.arguments)) for call in wanted),
        )


class Fault(_Strict):
    """Something that goes wrong with an answer."""

    when: str = ""
    """Only in conversations whose first user message contains this."""
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
    def _does_something(self) -> Fault:
        if not self.breaks and self.hang is None and self.delay is None and self.per_token_delay is None:
            raise ValueError("a fault needs an effect, such as `status` or `cut_after`")
        return self

    @property
    def breaks(self) -> bool:
        ended = self.status is not None or self.cut_after is not None or self.error_chunk is not None
        return ended or self.stall_after is not None or self.close or self.malformed

    @property
    def most(self) -> int | None:
        """How often it happens in one conversation; None is every time."""
        return self.times or (1 if self.breaks or self.hang is not None else None)


class TaskTurns(_Strict):
    when: str = ""
    turns: list[Turn] = Field(min_length=1)


class ScriptFile(_Strict):
    model: str = Field(default="replay", min_length=1)
    engine: Engine = "vllm"
    seed: int = 0
    max_context: int | None = Field(default=None, ge=1)
    tokens_per_chunk: int = Field(default=1, ge=1)
    weight_version: str | None = None
    rejects: list[str] = Field(default_factory=list)
    tasks: list[TaskTurns] = Field(default_factory=list)
    faults: list[Fault] = Field(default_factory=list)
