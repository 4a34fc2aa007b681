"""One call from request to record: shape it, try it, pass the answer on, keep what came.

Knows the upstream and a `Reply` to write to, and no HTTP server. Retries are made here and nowhere else,
as long as nothing of an answer has reached the agent.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from paddock.rollouts.capture.answer import Answer
from paddock.rollouts.capture.refusals import CONTEXT_CODE, Fault, read_error
from paddock.rollouts.capture.shaping import Lessons, Shaped, lesson, shape
from paddock.rollouts.capture.sse import DONE, EventReader, EventTooLong
from paddock.rollouts.capture.upstream import Failure, pause

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.rollouts.blame import Blamed
    from paddock.rollouts.capture.dialects.base import Writer
    from paddock.rollouts.capture.engines.base import Engine
    from paddock.rollouts.capture.settings import CaptureSettings
    from paddock.rollouts.capture.upstream import Answered, Upstream
    from paddock.rollouts.masking import Mask
    from paddock.rollouts.models.endpoint import Endpoint
    from paddock.rollouts.trace import Call

MOST_LESSONS = 6
"""How often one call may be changed and sent again because the endpoint refused a field."""
PROMPT_IDS_SECONDS = 10.0
FINAL_WORDS = "the model endpoint does not work, and the attempts at this call are used up"
"""Agents read errors for words and numbers that promise a better next time. This text holds none of them, so
that nobody repeats what was repeated here; the call itself keeps the reason."""
MISSHAPEN = (AttributeError, KeyError, TypeError, ValueError)
"""What comes of reading an answer that is not what it should be."""
LAST_WORD_SECONDS = 2.0
PATH = "/chat/completions"


class AgentGone(Exception):
    """The agent hung up."""


class Reply(Protocol):
    """Where an answer goes. Every method raises AgentGone if the agent hung up."""

    begun: bool
    """Whether the agent has got anything yet, be it only a comment: a status can no longer be told."""

    async def send(self, events: bytes) -> None:
        """Write whole events at once."""

    async def answer(self, status: int, document: bytes) -> None:
        """Write the one document of an answer that is no stream."""

    async def end(self) -> None:
        """Nothing more will come."""


@dataclass(slots=True)
class CallTimes:
    """When the endpoint was asked and heard of, on the clock of `time.monotonic`. See `CallSummary`."""

    began: float = field(default_factory=time.monotonic)
    attempt_began: float | None = None
    last_byte: float | None = None
    ended: float | None = None
    streamed: bool = True
    fault: Blamed | None = None

    def begin_attempt(self, *, streamed: bool) -> None:
        self.attempt_began, self.streamed, self.last_byte = time.monotonic(), streamed, None

    def hear(self) -> None:
        self.last_byte = time.monotonic()

    def pause(self) -> None:
        """The attempt was refused or broke."""
        self.attempt_began = self.last_byte = None


@dataclass(slots=True)
class Exchange:
    """Fills `call`. After `run`, `failure` says whether the endpoint broke or refused."""

    call: Call
    body: dict[str, Any]
    """What the agent asked, as a chat completion."""
    writer: Writer
    """Says it in the agent's dialect."""
    endpoint: Endpoint
    upstream: Upstream
    settings: CaptureSettings
    reply: Reply
    mask: Mask
    refuse: Callable[[Fault], bytes]
    """Writes a refusal in the agent's dialect."""
    headers: Mapping[str, str]
    """Those of the agent's that may go upstream."""
    room: int
    """The most tokens this call may sample."""
    limit: float
    """When the call must have ended, on the loop's clock."""
    failure: Failure | None = None
    times: CallTimes = field(default_factory=CallTimes)
    _answer: Answer = field(init=False)
    _delivered: bool = False
    """The agent has the whole answer."""
    _passed: bool = False
    """The writer has taken some of the answer, so no other attempt can take its place."""
    _engine: Engine = field(init=False)
    _prompt_ids: asyncio.Task[list[int]] | None = None

    def __post_init__(self) -> None:
        self._begin_answer()

    def _begin_answer(self) -> None:
        """Each attempt has an answer of its own: nothing of an attempt that failed may stand in the next one."""
        self._answer = Answer(strip=self.settings.transparent)
        self.call.first_token = None

    @property
    def wants_stream(self) -> bool:
        return bool(self.body.get("stream"))

    async def run(self) -> None:
        """Answer the agent. Comes back when the call is over, however it went; only cancellation passes through."""
        try:
            await self._run_until_limit()
        except AgentGone:
            self._abort("the agent hung up")
        except asyncio.CancelledError:
            self._abort("the call was cut off")
            raise
        except Exception as error:
            self.call.error = self.mask.text(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._forget_prompt_ids()
            self._answer.tell_version(self.settings.weights.current(), engine=False)
            self._answer.apply(self.call)

    async def _run_until_limit(self) -> None:
        try:
            async with asyncio.timeout_at(self.limit):
                await self._try_until_answered()
        except TimeoutError:
            if self._delivered:
                return
            self.call.aborted = True
            await self._fail_late(Failure("the call took too long and was ended", status=self.call.status))

    async def _fail_late(self, failure: Failure) -> None:
        """The time is up, and perhaps because the agent does not read: it gets a moment and no more."""
        try:
            async with asyncio.timeout(LAST_WORD_SECONDS):
                await self._fail(failure)
        except TimeoutError:
            self._abort("the agent stopped reading")

    def _abort(self, reason: str) -> None:
        if not self._delivered:
            self.call.aborted = True
            self.call.error = self.call.error or reason

    # -- attempts -----------------------------------------------------------------------------------

    async def _try_until_answered(self) -> None:
        self._engine = await self.upstream.engine(self.endpoint)
        self.call.engine = self._engine.name
        self.call.model = self.endpoint.name
        known = self.upstream.lessons(self.endpoint)
        lessons, failed, changed = known, 0, 0
        while True:
            shaped = self._shape(lessons)
            started = time.time()
            try:
                await self._attempt(shaped)
            except Failure as failure:
                if self._passed:
                    return await self._fail(failure, again=True)
                better = None
                if changed < MOST_LESSONS and not failure.is_context_overflow:
                    complaint = f"{failure.message} {failure.param or ''}"
                    better = lesson(shaped, lessons, failure.status, complaint)
                if better is not None:
                    lessons, changed = better, changed + 1
                    self._forget_prompt_ids()
                    self._note(failure, started)
                    continue
                failed += 1
                wait = pause(self.settings, failed, failure)
                late = asyncio.get_running_loop().time() + wait >= self.limit
                if not failure.retryable or failed >= self.settings.attempts or late:
                    return await self._fail(failure)
                self._note(failure, started)
                self.times.pause()
                await asyncio.sleep(wait)
            else:
                # Only a success proves that the fields left out were the ones refused.
                if lessons != known:
                    self.upstream.learn(self.endpoint, lessons)
                return None

    def _shape(self, lessons: Lessons) -> Shaped:
        shaped = shape(
            self.body,
            name=self.endpoint.name,
            engine=self._engine,
            settings=self.settings,
            lessons=lessons,
            room=self.room,
        )
        self.call.forwarded = self.mask.value(shaped.parameters)
        temperature = shaped.body.get("temperature")
        self.call.temperature = float(temperature) if isinstance(temperature, int | float) else None
        self.call.logprobs_kind = self._engine.logprobs_kind
        return shaped

    async def _attempt(self, shaped: Shaped) -> None:
        idle = self.settings.idle_timeout if shaped.streams else self.settings.unary_timeout
        self._begin_answer()
        self._ask_for_prompt_ids(shaped)
        self.call.status = None
        self.call.admitted_version = self.settings.weights.current()
        payload = orjson.dumps(shaped.body)
        self.times.begin_attempt(streamed=shaped.streams)
        try:
            async with self.upstream.post(self.endpoint, PATH, payload, headers=self.headers, idle=idle) as answered:
                self.call.status = answered.status
                self.times.hear()
                self._answer.tell_version(answered.headers.get("x-weight-version"))
                if answered.streams and not shaped.streams:
                    raise Failure("the endpoint streams although it was not asked to", status=answered.status)
                await (self._pass_stream(answered) if answered.streams else self._pass_document(answered))
        except Failure as failure:
            self.call.status = failure.status or self.call.status
            raise
        await self._take_prompt_ids()

    def _note(self, failure: Failure, started: float) -> None:
        attempt = {"status": failure.status, "error": self.mask.text(failure.message)}
        self.call.attempts.append({**attempt, "started": started, "ended": time.time()})

    # -- answers ------------------------------------------------------------------------------------

    async def _pass_stream(self, answered: Answered) -> None:
        """Pass events on as they come. How they are cut into reads makes no difference: what comes before a broken
        event is passed on before the attempt fails, also if both came in one read."""
        reader, done = EventReader(), False
        held: list[tuple[bytes, dict[str, Any], bool]] = []
        async for piece in answered.pieces():
            failure: Failure | None = None
            try:
                events = read_events(reader, piece)
                if not reader.only_comments:
                    self.times.hear()
                done = self._take_events(events, held)
            except Failure as error:
                failure = error
            # An opening is held back: until the answer says something, a broken attempt can be repeated.
            if self._answer.says_something and (held or done):
                await self._send_held(held, done=done)
            if failure is not None:
                raise failure
            if done:
                break
        if self._answer.finish_reason is None:
            raise Failure("the endpoint ended its stream in the middle of an answer", status=answered.status)
        if not done:
            await self.reply.send(self._write([], end=True))
            self._delivered = True
        await self.reply.end()
        await answered.drain()

    def _take_events(self, events: list[bytes], held: list[tuple[bytes, dict[str, Any], bool]]) -> bool:
        """Read events into the answer and into `held`. True if the last of the stream is among them."""
        for data in events:
            if data == DONE:
                return True
            chunk = read_chunk(data)
            held.append((data, chunk, self._take(chunk)))
            if self.call.first_token is None and self._answer.says_something:
                self.call.first_token = time.time()
        return False

    async def _send_held(self, held: list[tuple[bytes, dict[str, Any], bool]], *, done: bool) -> None:
        finished = self._answer.finish_reason is not None
        self._passed = True
        out = self._write(held, end=done and finished)
        held.clear()
        if out:
            await self.reply.send(out)
        self._delivered = finished and (done or self.writer.finish_completes)

    def _write(self, held: list[tuple[bytes, dict[str, Any], bool]], *, end: bool) -> bytes:
        out = bytearray()
        try:
            for data, chunk, taken in held:
                out += self.writer.chunk(data, chunk, changed=taken)
        except MISSHAPEN as error:
            raise misshapen(error) from error
        if end:
            out += self.writer.end()
        return bytes(out)

    async def _pass_document(self, answered: Answered) -> None:
        document = await answered.document()
        if document.get("error"):
            raise in_stream(document, answered.status)
        choices = document.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise Failure("the endpoint's answer holds no choice", status=answered.status)
        self._take(document)
        self.call.first_token = time.time()
        self._passed = True
        try:
            written = self.writer.replay(document) if self.wants_stream else self.writer.document(document)
        except MISSHAPEN as error:
            raise misshapen(error) from error
        if self.wants_stream:
            await self.reply.send(written)
            self._delivered = True
            await self.reply.end()
        else:
            await self.reply.answer(200, written)
            self._delivered = True

    def _take(self, document: dict[str, Any]) -> bool:
        try:
            return self._answer.take(document)
        except MISSHAPEN as error:
            raise misshapen(error) from error

    async def _fail(self, failure: Failure, *, again: bool = False) -> None:
        """Tell the agent, in the one way that is still open, so that it tries `again` or does not."""
        self.failure, self.times.fault = failure, failure.blamed
        self.call.error = message = self.mask.text(failure.message)
        if again:
            fault = Fault(400, f"server error: {message}", "server_error", again=True)
        elif failure.retryable or failure.status is None or self._passed:
            fault = Fault(400, FINAL_WORDS, "upstream_error")
        else:
            kind = failure.kind or "invalid_request_error"
            fault = Fault(failure.status, message, kind, failure.code, failure.param)
        if self.reply.begun or self.writer.fails_in_stream(fault):
            await self.reply.send(self.writer.fail(fault))
            await self.reply.end()
        else:
            await self.reply.answer(fault.status, self.refuse(fault))

    # -- prompt ids of engines that do not tell them ------------------------------------------------

    def _ask_for_prompt_ids(self, shaped: Shaped) -> None:
        question = self._engine.prompt_ids
        if question is None or not self.settings.transparent or self._prompt_ids is not None:
            return

        async def ask(path: str, document: dict[str, Any]) -> dict[str, Any]:
            return await self.upstream.ask(self.endpoint, path, document)

        self._prompt_ids = asyncio.create_task(self._find_prompt_ids(question(ask, shaped.body)))

    def _forget_prompt_ids(self) -> None:
        """Without a field that the endpoint refused, the prompt may be another one."""
        if self._prompt_ids is not None:
            self._prompt_ids.cancel()
            self._prompt_ids = None

    async def _find_prompt_ids(self, question: Any) -> list[int]:
        try:
            async with asyncio.timeout(PROMPT_IDS_SECONDS):
                found: list[int] = await question
                return found
        except (Failure, TimeoutError, KeyError, TypeError, ValueError):
            return []

    async def _take_prompt_ids(self) -> None:
        """Believed only if the engine counted as many."""
        if self._prompt_ids is None or self._answer.prompt_ids:
            return
        found = await self._prompt_ids
        if found and len(found) == self._answer.usage.get("prompt_tokens"):
            self._answer.prompt_ids = found


def misshapen(error: Exception) -> Failure:
    return Failure(f"the endpoint's answer has a shape that nobody knows: {error}")


def read_events(reader: EventReader, piece: bytes) -> list[bytes]:
    try:
        return reader.feed(piece)
    except EventTooLong as error:
        raise Failure(str(error), retryable=False) from error


def read_chunk(data: bytes) -> dict[str, Any]:
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Failure(f"the endpoint's stream holds something that is not JSON: {error}") from error
    if not isinstance(chunk, dict):
        raise Failure("the endpoint's stream holds something that is not an object")
    if chunk.get("error"):
        raise in_stream(chunk, None)
    return chunk


def in_stream(chunk: dict[str, Any], status: int | None) -> Failure:
    """An error told where an answer should be."""
    told = read_error(orjson.dumps(chunk))
    code = told["code"]
    if isinstance(code, int) and 400 <= code < 600:
        status = code
    refused = code == CONTEXT_CODE or (isinstance(status, int) and status in (400, 404, 413, 422))
    status = 400 if code == CONTEXT_CODE else status
    kind = told["type"] if isinstance(told["type"], str) else None
    code = code if isinstance(code, str | int) else None
    return Failure(told["message"], status=status, retryable=not refused, kind=kind, code=code)
