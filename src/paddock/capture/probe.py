"""What an endpoint returns, tested with one short call that is made exactly like a call of a rollout."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.capture.dialects.chat import ChatWriter, write_openai_error
from paddock.capture.engines import find_engine, read_model_list
from paddock.capture.errors import UpstreamFailure
from paddock.capture.exchange import Exchange
from paddock.capture.masking import Mask
from paddock.capture.settings import CaptureSettings
from paddock.capture.tokens.tokenizer import check_installed
from paddock.capture.trace import Call, Level
from paddock.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from paddock.capture.upstream import Upstream
    from paddock.models.endpoint import Endpoint

MAX_TOKENS = 32
CALL_SECONDS = 120.0
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


@dataclass(slots=True)
class ProbeReport:
    """The capabilities of one endpoint."""

    url: str
    model: str
    engine: str
    level: Level
    streaming: bool
    """Tokens arrive as they are sampled; otherwise the agent gets the whole response at its end."""
    prompt_ids: int
    completion_ids: int
    logprobs: int
    tools: bool
    """It accepts a call with tools."""
    tool_calls: bool
    """The model called the tool, and the call was parsed."""
    models: list[str]
    latency: float
    """Seconds until the first token."""
    seconds: float
    finish_reason: str | None
    weight_version: str | None
    refused: list[str]
    """Fields that the endpoint refused."""
    token_mode_problem: str | None = None
    """Why token mode cannot be used on it; None if it can."""
    advice: list[str] = field(default_factory=list)

    @property
    def trainable(self) -> bool:
        return self.level is Level.TOKENS


class DiscardedReply:
    """A reply that is not sent to anybody."""

    def __init__(self) -> None:
        self.has_started = False

    async def send_events(self, events: bytes) -> None:
        self.has_started = True

    async def send_document(self, status: int, document: bytes) -> None:
        self.has_started = True

    async def finish(self) -> None:
        self.has_started = True


async def probe(endpoint: Endpoint, upstream: Upstream, settings: CaptureSettings | None = None) -> ProbeReport:
    """Make one short call with a tool and report the response. Raises ModelError if there is none."""
    settings = settings or CaptureSettings(attempts=2, call_timeout=CALL_SECONDS)
    models = await _list_models(endpoint, upstream)
    call = await _make_call(endpoint, upstream, settings, tools=True)
    tools = call.error is None
    if not tools and call.status is not None and 400 <= call.status < 500:
        call = await _make_call(endpoint, upstream, settings, tools=False)
    if call.error is not None:
        status = f" (status {call.status})" if call.status else ""
        hint = "check the URL, the key and the model's name" if models is None else f"it serves: {', '.join(models)}"
        raise ModelError(f"{endpoint.display_name} does not answer{status}: {call.error}", hint=hint)
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
        refused=sorted(upstream.compatibility(endpoint).refused_fields),
    )
    report.token_mode_problem = find_token_mode_problem(report.engine)
    report.advice = advise(report)
    return report


def find_token_mode_problem(engine: str) -> str | None:
    if find_engine(engine).token_api is None:
        return f"the engine ({engine}) is not known to take token ids: vLLM, SGLang and llama.cpp do"
    try:
        check_installed()
    except ConfigError as error:
        return f"{error}: {error.hint}"
    return None


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
        problem = f"no {' and no '.join(missing)}" if missing else "ids and logprobs differ in number"
        hint = find_engine(report.engine).upgrade_hint
        advice.append(f"rollouts will not be trainable: {problem}; {hint}")
    if not report.tools:
        advice.append("calls with tools are refused: start the server with a tool parser for this model")
    elif not report.tool_calls:
        advice.append(
            "the model did not call the tool it was offered: check its tool parser, or take a stronger model"
        )
    if report.models and report.model not in report.models:
        advice.append(f"the server does not list {report.model!r}: it lists {', '.join(report.models)}")
    if not report.streaming:
        api = find_engine(report.engine).token_api
        can_stream = report.token_mode_problem is None and api is not None and api.can_stream
        otherwise = "; token mode (--tokens) streams them" if can_stream else ""
        advice.append(
            "answers reach the agent only when they are complete: this engine does not stream with token ids"
            + otherwise
        )
    return advice


async def _list_models(endpoint: Endpoint, upstream: Upstream) -> list[str] | None:
    try:
        return [str(model.get("id")) for model in read_model_list(await upstream.get(endpoint, "/models"))]
    except UpstreamFailure:
        return None


async def _make_call(endpoint: Endpoint, upstream: Upstream, settings: CaptureSettings, *, tools: bool) -> Call:
    body: dict[str, Any] = {"messages": MESSAGES, "stream": True, "max_tokens": MAX_TOKENS}
    if tools:
        body |= {"tools": [TOOL], "tool_choice": "auto"}
    call = Call("probe", 0, request=body, started=time.time())
    exchange = Exchange(
        call=call,
        chat=body,
        writer=ChatWriter(endpoint.name, include_usage=True),
        error_body=write_openai_error,
        endpoint=endpoint,
        upstream=upstream,
        settings=settings,
        reply=DiscardedReply(),
        mask=Mask.of_endpoint(endpoint),
        headers={},
        max_tokens=MAX_TOKENS,
        ends_at=asyncio.get_running_loop().time() + settings.call_timeout,
    )
    await exchange.run()
    call.ended = time.time()
    return call
