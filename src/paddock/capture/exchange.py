"""One model call: build the request, send it, pass the response on to the agent, fill the record of the call.

Knows the upstream and a `Reply` to write to, and no HTTP server. Retries happen here and nowhere else, and only while
nothing of a response has reached the agent.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from paddock.capture.call_summary import CallTimes
from paddock.capture.completion import GIVEN_UP, Completion
from paddock.capture.errors import FINAL_MESSAGE, ErrorReply, UpstreamFailure
from paddock.capture.gate import AttemptAborted, CallGate, GatedAttempt
from paddock.capture.paused_time import PausedTime
from paddock.capture.reply import AgentDisconnected, send_error
from paddock.capture.tokenizer import PromptIds
from paddock.capture.upstream import retry_pause
from paddock.capture.upstream_request import Compatibility, UpstreamRequest, adapt, build_request
from paddock.protocol.sse import DONE, EventReader, EventTooLong

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.capture.dialects.base import ReplyWriter
    from paddock.capture.engines import InferenceEngine
    from paddock.capture.masking import Mask
    from paddock.capture.reply import Reply
    from paddock.capture.settings import CaptureSettings
    from paddock.capture.tokens.conversations import TokenConversations
    from paddock.capture.tokens.request import TokenCall
    from paddock.capture.trace import Call
    from paddock.capture.upstream import Upstream, UpstreamResponse
    from paddock.models.endpoint import Endpoint

    Chunk = tuple[bytes, dict[str, Any], bool]
    """The bytes of a chunk, the chunk, and whether fields were removed from it."""

MAX_ADAPTATIONS = 6
"""How often one call may be changed and sent again because the endpoint refused a field."""
UNEXPECTED_FORM = (AttributeError, KeyError, TypeError, ValueError)
"""What reading a response of an unexpected form raises."""
LAST_ERROR_SECONDS = 2.0
CUT_OFF_BY_PAUSE = "a pause cut it off, and the call was asked again afterwards"


@dataclass(slots=True)
class Exchange:
    """Fills `call`. After `run`, `failure` is set if the endpoint failed or refused."""

    call: Call
    chat: dict[str, Any]
    """The agent's request as a chat completion."""
    writer: ReplyWriter
    """Writes the reply in the agent's dialect."""
    endpoint: Endpoint
    upstream: Upstream
    settings: CaptureSettings
    reply: Reply
    mask: Mask
    error_body: Callable[[ErrorReply], bytes]
    """Writes an error in the agent's dialect."""
    headers: Mapping[str, str]
    """Those of the agent's request that are forwarded."""
    max_tokens: int
    """The most tokens that this call may sample."""
    ends_at: float
    """When the call must have ended, on the event loop's clock. A pause moves it."""
    tokens: TokenConversations | None = None
    """The conversations as token ids, in token mode."""
    gate: CallGate = field(default_factory=CallGate)
    """Lets attempts through, unless the run is paused."""
    paused: PausedTime = field(default_factory=PausedTime)
    failure: UpstreamFailure | None = None
    times: CallTimes = field(default_factory=CallTimes)
    _completion: Completion = field(init=False)
    _is_delivered: bool = False
    """The agent has the whole reply."""
    _attempt: GatedAttempt = field(default_factory=GatedAttempt)
    _limit: asyncio.Timeout = field(init=False)
    _engine: InferenceEngine = field(init=False)
    _token_call: TokenCall | None = None
    """This call in token mode."""
    _prompt_ids: PromptIds = field(init=False)

    def __post_init__(self) -> None:
        self._prompt_ids = PromptIds(self.endpoint, self.upstream)
        self._reset_completion()

    def _reset_completion(self) -> None:
        """Each attempt has its own completion: nothing of a failed attempt may be in the next one."""
        self._completion = Completion(strip=self.settings.transparent)
        self.call.first_token = None

    async def run(self) -> None:
        """Answer the agent. Returns when the call has ended, however it went; only cancellation is raised."""
        try:
            await self._run_until_timeout()
        except AgentDisconnected:
            self._abort("the agent hung up")
        except asyncio.CancelledError:
            self._abort("the call was cut off")
            raise
        except Exception as error:
            self.call.error = self.mask.text(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._prompt_ids.cancel()
            self._completion.set_weight_version(self.settings.weights.current(), from_engine=False)
            self._completion.copy_to(self.call)

    async def _run_until_timeout(self) -> None:
        try:
            async with asyncio.timeout_at(self.ends_at) as self._limit:
                await self._attempt_until_answered()
        except TimeoutError:
            if self._is_delivered:
                return
            self.call.aborted = True
            # The agent may have stopped reading, so sending the error has a short deadline.
            failure = UpstreamFailure("the call took too long and was ended", status=self.call.status)
            try:
                async with asyncio.timeout(LAST_ERROR_SECONDS):
                    await self._send_error(failure)
            except TimeoutError:
                self._abort("the agent stopped reading")

    def _abort(self, reason: str) -> None:
        if not self._is_delivered:
            self.call.aborted = True
            self.call.error = self.call.error or reason

    # -- attempts -----------------------------------------------------------------------------------

    async def _attempt_until_answered(self) -> None:
        try:
            await self._wait_while_paused(None)
            if self.tokens is not None:
                await self._detect_engine()
                self._token_call = await self.tokens.prepare(self.call, self.chat, self._engine)
        except UpstreamFailure as failure:
            return await self._send_error(failure)
        initial = self.upstream.compatibility(self.endpoint)
        compatibility, failures, adaptations = initial, 0, 0
        held_since: float | None = None
        while True:
            try:
                await self._wait_while_paused(held_since)
            except UpstreamFailure as failure:
                return await self._send_error(failure)
            held_since, started = time.monotonic(), time.time()
            try:
                async with self.gate.attempt() as self._attempt:
                    await self._detect_engine()
                    request = self._build_request(compatibility)
                    await self._ask(request)
            except AttemptAborted:
                self._prompt_ids.cancel()
                self._record_attempt(UpstreamFailure(CUT_OFF_BY_PAUSE), started)
                self.times.end_attempt()
                continue
            except UpstreamFailure as failure:
                held_since = None
                if self._attempt.is_committed:
                    return await self._send_error(failure, invite_retry=True)
                adapted = None
                if adaptations < MAX_ADAPTATIONS and not failure.is_context_overflow:
                    error = f"{failure.message} {failure.param or ''}"
                    adapted = adapt(request, compatibility, failure.status, error)
                if adapted is not None:
                    compatibility, adaptations = adapted, adaptations + 1
                    # Without the refused field, the prompt may be another one.
                    self._prompt_ids.cancel()
                    self._record_attempt(failure, started)
                    continue
                failures += 1
                pause = retry_pause(self.settings, failures, failure)
                is_too_late = asyncio.get_running_loop().time() + pause >= self.ends_at
                if not failure.retryable or failures >= self.settings.attempts or is_too_late:
                    return await self._send_error(failure)
                self._record_attempt(failure, started)
                self.times.end_attempt()
                await asyncio.sleep(pause)
            else:
                # Only a success proves that the dropped fields were the refused ones.
                if compatibility != initial:
                    self.upstream.set_compatibility(self.endpoint, compatibility)
                return None

    async def _wait_while_paused(self, since: float | None) -> None:
        """Wait until the gate is open. The call's time stands still, also for an attempt since `since` that a pause
        cut off. Raises UpstreamFailure if the pause is longer than the agent waits for an answer."""
        if since is None and not self.gate.is_paused:
            return
        since = time.monotonic() if since is None else since
        is_stream = bool(self.chat.get("stream"))
        seconds = self.settings.pause_timeout if is_stream else self.settings.unary_pause_timeout
        self._limit.reschedule(None)
        try:
            with self.paused.hold(since):
                async with asyncio.timeout(max(0.0, self.times.began + seconds - time.monotonic())):
                    await self.gate.wait_open()
        except TimeoutError:
            problem = f"the model was paused for longer than {seconds:g} s"
            raise UpstreamFailure(problem, retryable=False) from None
        finally:
            held = time.monotonic() - since
            self.call.paused_seconds += held
            self.ends_at += held
            self._limit.reschedule(self.ends_at)

    async def _detect_engine(self) -> None:
        self._engine = await self.upstream.detect_engine(self.endpoint)
        self.call.engine = self._engine.name
        self.call.model = self.endpoint.name

    def _build_request(self, compatibility: Compatibility) -> UpstreamRequest:
        if self._token_call is not None:
            request = self._token_call.build(self.chat, self.settings, compatibility, self.max_tokens)
        else:
            request = build_request(
                self.chat,
                model=self.endpoint.name,
                engine=self._engine,
                settings=self.settings,
                compatibility=compatibility,
                max_tokens=self.max_tokens,
            )
        self.call.forwarded = self.mask.value(request.parameters)
        self.call.temperature = request.temperature
        self.call.logprobs_kind = self._engine.logprobs_kind
        return request

    async def _ask(self, request: UpstreamRequest) -> None:
        idle = self.settings.idle_timeout if request.is_stream else self.settings.unary_timeout
        self._reset_completion()
        if self._token_call is not None:
            self._token_call.start_attempt()
            self._completion.prompt_ids = self._token_call.prompt
        elif self._engine.fetch_prompt_ids is not None and self.settings.transparent:
            self._prompt_ids.request(self._engine.fetch_prompt_ids, request.body)
        self.call.status = None
        self.call.admitted_version = self.settings.weights.current()
        payload = orjson.dumps(request.body)
        self.times.start_attempt(streamed=request.is_stream)
        try:
            async with self.upstream.post(
                self.endpoint,
                request.path,
                payload,
                headers=self.headers,
                idle=idle,
                root=request.at_root,
            ) as response:
                self.call.status = response.status
                self.times.record_byte()
                self._completion.set_weight_version(response.headers.get("x-weight-version"))
                if response.is_stream and not request.is_stream:
                    raise UpstreamFailure("the endpoint streams although it was not asked to", status=response.status)
                await (self._pass_stream(response) if response.is_stream else self._pass_document(response))
        except UpstreamFailure as failure:
            self.call.status = failure.status or self.call.status
            raise
        if not self._completion.prompt_ids:
            self._completion.prompt_ids = await self._prompt_ids.wait(self._completion.usage.get("prompt_tokens"))

    def _record_attempt(self, failure: UpstreamFailure, started: float) -> None:
        attempt = {"status": failure.status, "error": self.mask.text(failure.message)}
        self.call.attempts.append({**attempt, "started": started, "ended": time.time()})

    # -- responses ----------------------------------------------------------------------------------

    async def _pass_stream(self, response: UpstreamResponse) -> None:
        """Pass events on as they arrive. The result does not depend on how they are split into reads: events before
        a broken one are passed on before the attempt fails, even if all came in one read."""
        reader, done = EventReader(), False
        pending: list[Chunk] = []
        async for piece in response.pieces():
            failure: UpstreamFailure | None = None
            try:
                events = read_events(reader, piece)
                if not reader.only_comments:
                    self.times.record_byte()
                done = await self._read_chunks(events, pending)
            except UpstreamFailure as error:
                failure = error
            # The first chunks are held back until there is content: until then a failed attempt can be repeated.
            if (pending or done) and self._has_content_to_send(pending):
                await self._send_pending(pending, done=done)
            if failure is not None:
                raise failure
            if done:
                break
        if self._completion.finish_reason is None:
            raise UpstreamFailure("the endpoint ended its stream in the middle of an answer", status=response.status)
        if not done:
            await self.reply.send_events(self._write([], end=True))
            self._is_delivered = True
        await self.reply.finish()
        await response.drain()

    async def _read_chunks(self, events: list[bytes], pending: list[Chunk]) -> bool:
        """Read events into the completion and into `pending`. True if the last event of the stream is among them."""
        for data in events:
            if data == DONE:
                return True
            chunks = [read_chunk(data)]
            if self._token_call is not None:
                chunks = await self._token_call.read_event(chunks[0])
            for chunk in chunks:
                changed = self._read(chunk)
                if self._token_call is None:
                    pending.append((data, chunk, changed))
                elif is_visible(chunk):
                    pending.append((data, chunk, True))
            if self.call.first_token is None and self._completion.has_content:
                self.call.first_token = time.time()
        return False

    def _has_content_to_send(self, pending: list[Chunk]) -> bool:
        if self._token_call is None or self._attempt.is_committed:
            return self._completion.has_content
        # Tokens of a tool call are no text until it is complete.
        return any(is_content(chunk) for _, chunk, _ in pending)

    async def _send_pending(self, pending: list[Chunk], *, done: bool) -> None:
        await self._attempt.commit()
        is_finished = self._completion.finish_reason is not None
        events = self._write(pending, end=done and is_finished)
        pending.clear()
        if events:
            await self.reply.send_events(events)
        self._is_delivered = is_finished and (done or self.writer.finish_completes)

    def _write(self, chunks: list[Chunk], *, end: bool) -> bytes:
        events = bytearray()
        try:
            for data, chunk, changed in chunks:
                events += self.writer.write_chunk(data, chunk, changed=changed)
        except UNEXPECTED_FORM as error:
            raise unexpected_form(error) from error
        if end:
            events += self.writer.write_end()
        return bytes(events)

    async def _pass_document(self, response: UpstreamResponse) -> None:
        document = await response.document()
        if document.get("error"):
            raise UpstreamFailure.from_document(document, response.status)
        if self._token_call is not None:
            document = await self._token_call.read_document(document)
        choices = document.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise UpstreamFailure("the endpoint's answer holds no choice", status=response.status)
        self._read(document)
        self.call.first_token = time.time()
        await self._attempt.commit()
        wants_stream = bool(self.chat.get("stream"))
        try:
            body = self.writer.write_as_stream(document) if wants_stream else self.writer.write_document(document)
        except UNEXPECTED_FORM as error:
            raise unexpected_form(error) from error
        if wants_stream:
            await self.reply.send_events(body)
            self._is_delivered = True
            await self.reply.finish()
        else:
            await self.reply.send_document(200, body)
            self._is_delivered = True

    def _read(self, document: dict[str, Any]) -> bool:
        try:
            changed = self._completion.read(document)
        except UNEXPECTED_FORM as error:
            raise unexpected_form(error) from error
        if self._completion.finish_reason in GIVEN_UP:
            raise UpstreamFailure("the endpoint cut the answer off")
        return changed

    async def _send_error(self, failure: UpstreamFailure, *, invite_retry: bool = False) -> None:
        """Send the error to the agent, as a status or in the stream, and so that it retries or does not."""
        self.failure, self.times.fault = failure, failure.fault
        self.call.error = message = self.mask.text(failure.message)
        if invite_retry:
            error = ErrorReply(400, f"server error: {message}", "server_error", invites_retry=True)
        elif failure.retryable or failure.status is None or self._attempt.is_committed:
            error = ErrorReply(400, FINAL_MESSAGE, "upstream_error")
        else:
            kind = failure.kind or "invalid_request_error"
            error = ErrorReply(failure.status, message, kind, failure.code, failure.param)
        await send_error(self.reply, self.writer, error, self.error_body)


def is_visible(chunk: dict[str, Any]) -> bool:
    """Whether a chunk has more than tokens, which were removed from it."""
    choices = chunk.get("choices") or ()
    return not choices or bool(choices[0].get("delta") or choices[0].get("finish_reason"))


def is_content(chunk: dict[str, Any]) -> bool:
    """Whether a chunk has a part of the answer, or its end."""
    choice = (chunk.get("choices") or [{}])[0]
    delta = choice.get("delta") or {}
    return bool(choice.get("finish_reason") or any(value for name, value in delta.items() if name != "role"))


def unexpected_form(error: Exception) -> UpstreamFailure:
    return UpstreamFailure(f"the endpoint's answer has an unexpected form: {error}")


def read_events(reader: EventReader, piece: bytes) -> list[bytes]:
    try:
        return [event.data for event in reader.feed(piece)]
    except EventTooLong as error:
        raise UpstreamFailure(str(error), retryable=False) from error


def read_chunk(data: bytes) -> dict[str, Any]:
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UpstreamFailure(f"the endpoint's stream holds something that is not JSON: {error}") from error
    if not isinstance(chunk, dict):
        raise UpstreamFailure("the endpoint's stream holds something that is not an object")
    if chunk.get("error"):
        raise UpstreamFailure.from_document(chunk, None)
    return chunk
