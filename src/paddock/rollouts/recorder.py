"""The recorder of a rollout: writes its record, its stages and its events to the store.

Events are written in the background, so that the caller of `emit` does not wait for the disk. A write that fails is
logged, and the rollout continues. Every text goes through the mask first. Decides nothing about the outcome.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from paddock.capture.trace import Call, Caller, Event, Level, Role
from paddock.store.outcome import Outcome, Reward

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from paddock.capture.masking import Mask
    from paddock.errors import RolloutError
    from paddock.sandbox.network.connections import ConnectionRecord
    from paddock.store import Store
    from paddock.store.record import RolloutRecord

logger = logging.getLogger("paddock.rollout")

LOG_BYTES = 16 * 1024
"""Kept of each log, and of each text in an agent's event."""
MOST_AGENT_EVENTS = 20_000
MOST_CONNECTION_EVENTS = 1000
"""The record has the others too."""
LEVELS = (Level.TEXT, Level.LOGPROBS, Level.TOKENS)


class RolloutRecorder:
    """Writes one rollout into the store: its record, events, calls and outcome, with secrets masked."""

    def __init__(self, store: Store, record: RolloutRecord, mask: Mask, on_change: Callable[[], None]) -> None:
        """`on_change` is called after each event."""
        self.store = store
        self.record = record
        self.mask = mask
        self._on_change = on_change
        self._agent_events = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that the rollout runs on; None before it begins and after it has ended."""
        self._writes: set[asyncio.Future[Any]] = set()

    # -- from begin to finish -----------------------------------------------------------------------

    async def begin(self) -> None:
        """Put the record into the store. Raises StoreError."""
        self._loop = asyncio.get_running_loop()
        await self.store.run(self.store.begin, self.record)

    @asynccontextmanager
    async def stage(self, name: str, seconds: float | None, blame: type[RolloutError]) -> AsyncIterator[None]:
        """The rollout is in this stage while the block runs. Raises `blame` when its time is up."""
        began = time.monotonic()
        self.record.stage = name
        self.emit("stage", {"stage": name})
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            limit = "in time" if seconds is None else f"within {seconds:g} s"
            raise blame(f"{name} did not finish {limit}") from error
        finally:
            # A task with steps has some stages several times.
            self.record.stages[name] = self.record.stages.get(name, 0.0) + time.monotonic() - began

    def take_reward(self, reward: Reward) -> None:
        record = self.record
        record.reward, record.reward_parts = reward.value, self.mask.value(reward.parts)
        record.reward_reason = None if reward.reason is None else self.mask.text(reward.reason)

    def end(self, outcome: Outcome, error: str | None) -> None:
        record = self.record
        record.outcome = outcome
        record.error = None if error is None else self.mask.text(error)
        if not outcome.keeps_reward and record.reward is None and record.reward_reason is None:
            record.reward_reason = Reward.unknown(f"not verified: outcome {outcome}").reason

    async def finish(self) -> None:
        """Write the final record, and the event of its outcome after it."""
        self._loop = None
        self.record.stage = "done"
        self.record.finished_at = self.record.finished_at or time.time()
        await self._wait_written()
        await self.store.run(self.store.finish, self.record)
        self.store.aborts.clear(self.record.rollout_id)
        self.emit("outcome", {"outcome": self.record.outcome, "reward": self.record.reward})
        await self._wait_written()

    # -- events and calls ---------------------------------------------------------------------------

    def emit(self, kind: str, data: dict[str, Any]) -> None:
        """Begin to write an event, and the record as it is now."""
        event = Event(time.time(), kind, data)
        self._write(self.store.run(self.store.add_event, self.record.rollout_id, event))
        self._write(self.store.run(self.store.update, self.record))
        self._on_change()

    def emit_agent_event(self, kind: str, data: dict[str, Any]) -> None:
        """An event that the agent reports. It may report without end: the rest is dropped, with a warning."""
        self._agent_events += 1
        if self._agent_events < MOST_AGENT_EVENTS:
            short = {key: text[:LOG_BYTES] if isinstance(text, str) else text for key, text in data.items()}
            self.emit(kind, self.mask.value(short))
        elif self._agent_events == MOST_AGENT_EVENTS:
            warning = f"the agent reported more than {MOST_AGENT_EVENTS} events; the rest is dropped"
            self.emit("warning", {"warning": warning})

    def record_connection(self, connection: ConnectionRecord) -> None:
        """A connection of a sandbox that has ended, or was refused."""
        values = self.mask.value(connection.to_json())
        self.record.connections.append(values)
        if len(self.record.connections) <= MOST_CONNECTION_EVENTS:
            # The record is written with the next other event: it would be written whole for each connection.
            event = Event(time.time(), "connection", values)
            self._write(self.store.run(self.store.add_event, self.record.rollout_id, event))
            self._on_change()

    def log_install(self, line: str) -> None:
        """Called on the thread that installs, which goes on even if the rollout has ended meanwhile."""
        logger.info("%s", line)
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._emit_install, line)

    def _emit_install(self, line: str) -> None:
        if self._loop is not None:
            self.emit("install", {"line": line})

    async def save_call(self, call: Call, calls: Iterable[Call]) -> None:
        """Keep a call that has ended; `calls` are all of the rollout."""
        self.count_calls(calls)
        await self.store.run(self.store.save_call, self.record.rollout_id, call)
        self.emit("call", {"call": call.id, "role": call.role, "error": call.error})

    def count_calls(self, calls: Iterable[Call]) -> None:
        ended = [call for call in calls if call.ended is not None]
        policy = [call for call in ended if call.caller is not Caller.FOREIGN]
        sampled = [call for call in policy if call.role in (Role.AGENT, Role.SUBAGENT) and call.ok]
        record = self.record
        record.call_count = len(ended)
        record.trainable_calls = sum(call.trainable for call in ended)
        record.prompt_tokens = sum(len(call.prompt_token_ids) for call in ended)
        record.completion_tokens = sum(len(call.completion_token_ids) for call in ended)
        own = (call.weight_version for call in sampled if call.replayed_from is None)
        record.weight_version = next((version for version in own if version is not None), None)
        record.level = min((call.level for call in sampled), key=LEVELS.index, default=Level.TEXT)

    async def put_blob(self, data: bytes) -> str:
        return await self.store.run(self.store.put_blob, data)

    # -- writing in the background ------------------------------------------------------------------

    async def _wait_written(self) -> None:
        if self._writes:
            await asyncio.wait(self._writes)

    def _write(self, work: Awaitable[Any]) -> None:
        write = asyncio.ensure_future(work)
        self._writes.add(write)
        write.add_done_callback(self._end_write)

    def _end_write(self, write: asyncio.Future[Any]) -> None:
        self._writes.discard(write)
        if not write.cancelled() and write.exception() is not None:
            logger.warning("an event of %s was not kept: %s", self.record.rollout_id, write.exception())
