"""What an endpoint gives back, found with one short call made exactly as a rollout would make it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.errors import ModelError
from paddock.rollouts.capture.dialects import chat
from paddock.rollouts.capture.engines import model_list
from paddock.rollouts.capture.exchange import Exchange
from paddock.rollouts.capture.settings import CaptureSettings
from paddock.rollouts.capture.upstream import Failure
from paddock.rollouts.masking import Mask
from paddock.rollouts.trace import Call, Level

if TYPE_CHECKING:
    from paddock.rollouts.capture.upstream import Upstream
    from paddock.rollouts.models.endpoint import Endpoint

ROOM = 32
SECONDS = 120.0
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
MESSAGES = [
    {"role": "system", "content": "You are a coding agent. Use the tools."},
    {"role": "user", "content": "List the files here with the bash tool."},
]
UPGRADES = {
    "vllm": "run a vLLM that knows `return_token_ids` (0.10.2 or later)",
    "sglang": "run an SGLang whose chat completions know `return_token_ids`",
    "llamacpp": "start the llama.cpp server with its own chat template (`--jinja`), so that /apply-template answers",
    "openai": "this API tells no token ids; serve the model with vLLM, SGLang or llama.cpp to train on it",
    "unknown": "serve the model with vLLM, SGLang or llama.cpp to train on it",
}


@dataclass(slots=True)
class ProbeReport:
    """One endpoint, as a rollout would find it."""

    url: str
    model: str
    engine: str
    level: Level
    streaming: bool
    """Tokens come as they are sampled; otherwise the agent gets the whole answer at its end."""
    prompt_ids: int
    completion_ids: int
    logprobs: int
    tools: bool
    """A call with tools is taken."""
    tool_calls: bool
    """The model used the tool: its calls are understood."""
    models: list[str]
    latency: float
    """Seconds until the first token."""
    seconds: float
    finish_reason: str | None
    weight_version: str | None
    refused: list[str]
    """Fields that the endpoint does not take."""
    advice: list[str] = field(default_factory=list)

    @property
    def trainable(self) -> bool:
        return self.level is Level.TOKENS


class Discard:
    """A reply that nobody reads."""

    def __init__(self) -> None:
        self.begun = False

    async def send(self, events: bytes) -> None:
        self.begun = True

    async def answer(self, status: int, document: bytes) -> None:
        self.begun = True

    async def end(self) -> None:
        self.begun = True


async def probe(endpoint: Endpoint, upstream: Upstream, settings: CaptureSettings | None = None) -> ProbeReport:
    """Make one short call with a tool and tell what came back. Raises ModelError if there is no answer."""
    settings = settings or CaptureSettings(attempts=2, call_timeout=SECONDS)
    models = await _models(endpoint, upstream)
    call = await _try(endpoint, upstream, settings, tools=True)
    tools = call.error is None
    if not tools and call.status is not None and 400 <= call.status < 500:
        call = await _try(endpoint, upstream, settings, tools=False)
    if call.error is not None:
        status = f" (status {call.status})" if call.status else ""
        hint = "check the URL, the key and the model's name" if models is None else f"it serves: {', '.join(models)}"
        raise ModelError(f"{endpoint.shown} does not answer{status}: {call.error}", hint=hint)
    report = ProbeReport(
        url=endpoint.url,
        model=endpoint.name,
        engine=call.engine,
        level=call.level,
        streaming=bool(call.forwarded.get("stream")),
        prompt_ids=len(call.prompt_token_ids),
        completion_ids=len(call.completion_token_ids),
        logprobs=len(call.logprobs),
        tools=tools,
        tool_calls=bool(call.message.get("tool_calls")),
        models=models or [],
        latency=(call.first_token or call.ended or call.started) - call.started,
        seconds=(call.ended or call.started) - call.started,
        finish_reason=call.finish_reason,
        weight_version=call.weight_version,
        refused=sorted(upstream.lessons(endpoint).refused),
    )
    report.advice = advise(report)
    return report


def advise(report: ProbeReport) -> list[str]:
    """What to change so that rollouts on this endpoint can be trained on."""
    advice: list[str] = []
    if report.level is not Level.TOKENS:
        missing = [
            name
            for name, count in (
                ("prompt ids", report.prompt_ids),
                ("completion ids", report.completion_ids),
                ("logprobs", report.logprobs),
            )
            if not count
        ]
        lacking = f"no {' and no '.join(missing)}" if missing else "ids and logprobs differ in number"
        advice.append(
            f"rollouts will not be trainable: {lacking}; {UPGRADES.get(report.engine, UPGRADES['unknown'])}"
        )
    if not report.tools:
        advice.append("calls with tools are refused: start the server with a tool parser for this model")
    elif not report.tool_calls:
        advice.append(
            "the model did not call the tool it was offered: check its tool parser, or take a stronger model"
        )
    if report.models and report.model not in report.models:
        advice.append(f"the server does not list {report.model!r}: it lists {', '.join(report.models)}")
    if not report.streaming:
        advice.append(
            "answers reach the agent only when they are complete: this engine does not stream with token ids"
        )
    return advice


async def _models(endpoint: Endpoint, upstream: Upstream) -> list[str] | None:
    try:
        return [str(model.get("id")) for model in model_list(await upstream.get(endpoint, "/models"))]
    except Failure:
        return None


async def _try(endpoint: Endpoint, upstream: Upstream, settings: CaptureSettings, *, tools: bool) -> Call:
    body: dict[str, Any] = {"messages": MESSAGES, "stream": True, "max_tokens": ROOM}
    if tools:
        body |= {"tools": [TOOL], "tool_choice": "auto"}
    call = Call("probe", 0, request=body, started=time.time())
    exchange = Exchange(
        call=call,
        body=body,
        writer=chat.ChatWriter(endpoint.name, usage=True),
        refuse=chat.error_document,
        endpoint=endpoint,
        upstream=upstream,
        settings=settings,
        reply=Discard(),
        mask=Mask.of_endpoint(endpoint),
        headers={},
        room=ROOM,
        limit=asyncio.get_running_loop().time() + settings.call_timeout,
    )
    await exchange.run()
    call.ended = time.time()
    return call
