"""The rollout service: all rollouts of this process, from the request until their outcome is stored.

It belongs to the process, not to a session: the client that started a rollout may disconnect, and any client can
query it by its id. Rollouts that have ended are read from the store, so that an answer is the same after a restart.
Knows nothing of tools or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paddock.capture.masking import Mask
from paddock.capture.trace import Event
from paddock.capture.upstream import Upstream
from paddock.config import PADDOCK_MAX_ROLLOUTS, PADDOCK_SANDBOX, PADDOCK_STORE, PADDOCK_UNSAFE
from paddock.envs.opencode.results import result_of
from paddock.errors import PaddockError, RolloutError, ServerDraining, ToolFailure
from paddock.rollouts.context import RunContext, open_endpoint
from paddock.rollouts.rollout import Rollout, new_rollout_id
from paddock.rollouts.sandboxes import recover
from paddock.shielded import run_shielded
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paddock.envs.opencode.request import RolloutRequest
    from paddock.envs.opencode.results import RolloutResult

logger = logging.getLogger("paddock.opencode")

SHUT_DOWN = "the server was shut down"
SHUTDOWN_SECONDS = 20.0
"""For all rollouts to end when the server does."""
ABORT_SECONDS = 5.0
"""That an abort waits for the outcome; the rollout is stopping in any case."""
POLL_SECONDS = 1.0
"""Between looks at a rollout that another process runs, or whose event came late."""
EVENTS_PER_PAGE = 500


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """What the operator of the server decides about its rollouts."""

    store: Path | None = None
    """The store's folder. None: the default one."""
    sandbox: str = "bwrap"
    consent: bool = False
    """Whether a sandbox that does not isolate may be used."""
    max_rollouts: int = 4
    """Rollouts at a time; more of them wait."""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> ServiceSettings:
        """From the environment variables. Raises ConfigError."""
        return cls(
            store=PADDOCK_STORE.read(environ),
            sandbox=PADDOCK_SANDBOX.read(environ),
            consent=PADDOCK_UNSAFE.read(environ),
            max_rollouts=PADDOCK_MAX_ROLLOUTS.read(environ),
        )


class QueueStore(Store):
    """A store that has a rollout from the moment it is requested, so that a crash cannot lose one in the queue."""

    def queue(self, record: RolloutRecord) -> None:
        super().begin(record)

    def begin(self, record: RolloutRecord) -> None:
        """The record was queued before, so it is only updated."""
        self.update(record)


class ActiveRollout:
    """One rollout that this process runs, or that waits for its turn."""

    def __init__(self, record: RolloutRecord, secrets: tuple[str, ...]) -> None:
        self.record = record
        self.secrets = secrets
        self.rollout: Rollout | None = None
        """None while it waits for its turn, or for its model."""
        self.task: asyncio.Task[None]
        self.changed = asyncio.Event()
        """Set at the next event; each one brings a new `changed`."""
        self.ended = asyncio.Event()
        self.stop_reason: str | None = None

    @property
    def id(self) -> str:
        return self.record.rollout_id

    async def run(self, rollout: Rollout) -> None:
        """Run it in a task of its own: an abort that comes at its last moment cancels nothing else."""
        running = asyncio.create_task(rollout.run())
        try:
            # It can be aborted only once it has begun.
            await asyncio.sleep(0)
            self.rollout = rollout
            await asyncio.shield(running)
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait([running])
            raise

    async def stop(self, reason: str) -> None:
        """Doing it again does nothing."""
        if self.stop_reason is not None or self.ended.is_set():
            return
        self.stop_reason = reason
        if self.rollout is None:
            self.task.cancel()
        else:
            await self.rollout.abort(reason)

    def notify(self, _: Rollout | None = None) -> None:
        """Wake everybody who waits for an event."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def end(self) -> None:
        self.ended.set()
        self.changed.set()


class OpenCodeRolloutService:
    def __init__(self, settings: ServiceSettings, store: QueueStore, opened: AsyncExitStack) -> None:
        self.settings = settings
        self._store = store
        self._opened = opened
        self._upstream: Upstream | None = None
        self._active: dict[str, ActiveRollout] = {}
        self._admission_lock = asyncio.Lock()
        self._admissions: set[asyncio.Task[RolloutRecord]] = set()
        self._slots = asyncio.Semaphore(settings.max_rollouts)
        self._closing = False

    @classmethod
    async def open(cls, settings: ServiceSettings) -> OpenCodeRolloutService:
        """Open the store, and give the rollouts of a killed server their outcome."""
        async with AsyncExitStack() as opened:
            store = await asyncio.to_thread(QueueStore.open, settings.store)
            assert isinstance(store, QueueStore)
            opened.push_async_callback(asyncio.to_thread, store.close)
            recovery = await store.run(recover, store)
            for rollout_id in recovery.rollouts:
                await store.run(store.add_event, rollout_id, _outcome_event(Outcome.CANCELLED, None))
            return cls(settings, store, opened.pop_all())

    async def close(self) -> None:
        """Every rollout ends as cancelled, with its sandbox, before the store is closed."""
        self._closing = True
        if self._admissions:
            await asyncio.wait(self._admissions)
        running = list(self._active.values())
        if running:
            await asyncio.gather(*(active.stop(SHUT_DOWN) for active in running))
            _, late = await asyncio.wait([active.task for active in running], timeout=SHUTDOWN_SECONDS)
            if late:
                logger.error("%d rollouts did not end in time: the next start gives them their outcome", len(late))
        await self._opened.aclose()

    # -- starting one -----------------------------------------------------------------------------

    async def start(self, request: RolloutRequest) -> RolloutRecord:
        """Start a rollout and return its record; the earlier one if its idempotency key was used before."""
        # Shielded: a cancelled caller must not leave a rollout in the store that is never run.
        admission = asyncio.create_task(self._admit(request))
        self._admissions.add(admission)
        admission.add_done_callback(self._admissions.discard)
        return await asyncio.shield(admission)

    async def _admit(self, request: RolloutRequest) -> RolloutRecord:
        async with self._admission_lock:
            if self._closing:
                raise ServerDraining("the server is shutting down", hint="ask another one, or again later")
            if self._upstream is None:
                self._upstream = await self._opened.enter_async_context(Upstream())
            existing = await self._find_same(request)
            if existing is not None:
                return existing
            record = self._new_record(request)
            await self._store.run(self._store.queue, record)
            active = ActiveRollout(record, request.config.secrets)
            self._active[record.rollout_id] = active
            active.task = asyncio.create_task(self._drive(active, request))
            # A task that is cancelled before its first step never runs, and would write no outcome.
            await asyncio.sleep(0)
            return record

    async def _find_same(self, request: RolloutRequest) -> RolloutRecord | None:
        rollout_id = request.rollout_id
        if rollout_id is None:
            return None
        active = self._active.get(rollout_id)
        record = active.record if active else await self._store.run(self._store.get, rollout_id)
        if record is None or record.rollout_id != rollout_id:
            return None
        if record.metadata.get("request") != request.fingerprint:
            raise ToolFailure(
                f"idempotency_key was used for rollout {rollout_id} with other arguments: choose a new key"
            )
        return record

    def _new_record(self, request: RolloutRequest) -> RolloutRecord:
        task, config = request.task, request.config
        assert isinstance(config.model, str)
        return RolloutRecord(
            rollout_id=request.rollout_id or new_rollout_id(),
            task_id=task.id,
            task_hash=task.hash,
            instruction=task.instruction,
            driver="serve",
            model=config.model_name or ("" if "://" in config.model else config.model),
            mode=config.mode,
            sandbox=self.settings.sandbox,
            metadata={"request": request.fingerprint},
            started_at=time.time(),
        )

    # -- running it -------------------------------------------------------------------------------

    async def _drive(self, active: ActiveRollout, request: RolloutRequest) -> None:
        """Wait for a slot, run the rollout, and store its outcome in every case."""
        outcome, error, stored = Outcome.CANCELLED, None, False
        try:
            async with self._slots, asyncio.timeout(request.seconds):
                await self._run(active, request)
            stored = True
        except asyncio.CancelledError:
            error = active.stop_reason
        except TimeoutError:
            outcome, error = (
                Outcome.ENVIRONMENT,
                f"it did not end within {request.seconds:g} s, all its deadlines together",
            )
        except PaddockError as failure:
            outcome, error = (Outcome.MODEL if active.rollout is None else Outcome.ENVIRONMENT), failure.message
        except Exception as failure:
            logger.exception("rollout %s broke", active.id)
            outcome, error = Outcome.ENVIRONMENT, f"{type(failure).__name__}: {failure}"
        finally:
            await run_shielded(self._settle(active, None if stored else outcome, error))

    async def _run(self, active: ActiveRollout, request: RolloutRequest) -> None:
        assert self._upstream is not None
        config = replace(request.config, sandbox=self.settings.sandbox, consent=self.settings.consent)
        await self._enter_stage(active, "model")
        async with open_endpoint(config) as endpoint:
            context = RunContext.create(config, endpoint=endpoint, store=self._store, upstream=self._upstream)
            await active.run(Rollout(request.task, context, record=active.record, on_change=active.notify))

    async def _enter_stage(self, active: ActiveRollout, stage: str) -> None:
        active.record.stage = stage
        active.record.started_at = time.time()
        await self._store.run(self._store.update, active.record)
        await self._store.run(self._store.add_event, active.id, Event(time.time(), "stage", {"stage": stage}))
        active.notify()

    async def _settle(self, active: ActiveRollout, outcome: Outcome | None, error: str | None) -> None:
        """Write the outcome of a rollout that could not write its own, and let it go."""
        record = active.record
        try:
            if outcome is not None:
                if not record.finished:
                    record.outcome = outcome
                    record.error = None if error is None else Mask(active.secrets).text(error)
                    record.reward_reason = record.reward_reason or f"not verified: outcome {outcome}"
                record.finished_at = record.finished_at or time.time()
                record.stage = "done"
                if await self._store.run(self._store.finish, record):
                    event = _outcome_event(record.outcome, record.reward)
                    await self._store.run(self._store.add_event, active.id, event)
        except RolloutError as failure:
            # It stays active, so that it can still be read.
            logger.error("the outcome of rollout %s is not stored: %s", active.id, failure)
        else:
            del self._active[active.id]
        active.end()

    # -- reading one ------------------------------------------------------------------------------

    @property
    def is_closing(self) -> bool:
        return self._closing

    async def record(self, rollout_id: str) -> RolloutRecord:
        """Its current record. Raises UnknownRollout."""
        active = self._active.get(rollout_id)
        if active is not None:
            return active.record
        record = await self._store.run(self._store.get, rollout_id)
        if record is None:
            raise UnknownRollout(
                f"there is no rollout {rollout_id!r} here: use the rollout_id that start_rollout gave"
            )
        return record

    async def wait(self, rollout_id: str, seconds: float) -> RolloutRecord:
        """Its record once it has ended, or as it stands after `seconds`."""
        deadline = time.monotonic() + seconds
        record = await self.record(rollout_id)
        while not record.finished or record.rollout_id in self._active:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                break
            active = self._active.get(record.rollout_id)
            if active is not None and active.ended.is_set():
                break
            await _wait(active.ended if active else None, seconds_left if active else min(seconds_left, POLL_SECONDS))
            record = await self.record(record.rollout_id)
        return record

    async def result(self, record: RolloutRecord) -> RolloutResult:
        """All that an ended rollout left behind, from the store."""

        def read() -> RolloutResult:
            return result_of(record, self._store.calls(record.rollout_id))

        return await self._store.run(read)

    async def messages(self, rollout_id: str) -> tuple[RolloutRecord, list[dict[str, Any]]]:
        """The agent's own transcript: from the agent while it runs, from the store afterwards."""
        record = await self.record(rollout_id)
        active = self._active.get(record.rollout_id)
        if active is None or active.rollout is None:
            return record, record.transcript
        return record, Mask(active.secrets).value(await active.rollout.messages())

    async def abort(self, rollout_id: str) -> RolloutRecord:
        """Stop a rollout and return its record. A rollout that has ended is not changed."""
        record = await self.record(rollout_id)
        active = self._active.get(record.rollout_id)
        if active is not None:
            await active.stop("aborted")
            return await self.wait(record.rollout_id, ABORT_SECONDS)
        if not record.finished:
            raise ToolFailure(f"rollout {record.rollout_id} runs in another process: abort it there")
        return record

    async def events(self, rollout_id: str, after: int, seconds: float) -> tuple[list[dict[str, Any]], bool]:
        """Events numbered above `after`, and whether none can follow. Waits up to `seconds` for the first."""
        deadline = time.monotonic() + seconds
        record = await self.record(rollout_id)
        while True:
            active = self._active.get(record.rollout_id)
            changed = active.changed if active else None
            # Read before the events: an event written in between would be missed otherwise.
            over = active is None and (await self.record(record.rollout_id)).finished
            rows = await self._store.run(self._store.events, record.rollout_id, after, EVENTS_PER_PAGE)
            seconds_left = deadline - time.monotonic()
            if rows or over or seconds_left <= 0 or self._closing:
                events = [{"seq": number, "at": e.at, "kind": e.kind, "data": e.data} for number, e in rows]
                return events, over and len(rows) < EVENTS_PER_PAGE
            await _wait(changed, min(seconds_left, POLL_SECONDS))


class UnknownRollout(ToolFailure, LookupError):
    http_status = 404


def _outcome_event(outcome: Outcome | None, reward: float | None) -> Event:
    return Event(time.time(), "outcome", {"outcome": outcome, "reward": reward})


async def _wait(event: asyncio.Event | None, seconds: float) -> None:
    """Until the event is set, for `seconds` at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await (event.wait() if event is not None else asyncio.sleep(seconds))


# -- the service of this process ----------------------------------------------------------------------

_services: dict[asyncio.AbstractEventLoop, asyncio.Task[OpenCodeRolloutService]] = {}


async def get_service() -> OpenCodeRolloutService:
    """The service of the running loop, opened when it is first needed. A failed opening is tried again."""
    loop = asyncio.get_running_loop()
    opening = _services.get(loop)
    if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
        opening = _services[loop] = loop.create_task(OpenCodeRolloutService.open(ServiceSettings.read()))
    return await asyncio.shield(opening)


async def close_service() -> None:
    opening = _services.pop(asyncio.get_running_loop(), None)
    if opening is not None:
        with suppress(PaddockError):
            await (await opening).close()
