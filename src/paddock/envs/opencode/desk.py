"""The desk: all rollouts of this process, from the moment they are asked for until their outcome is stored.

It belongs to the process, not to a session: whoever asked may leave, and anybody may ask by id.
What has ended is read from the store, so that an answer is the same after a restart. Knows nothing
of tools or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

from paddock.envs.opencode.live import Live, WaitingStore
from paddock.envs.opencode.results import result_of
from paddock.envs.opencode.settings import Settings, read_settings
from paddock.errors import PaddockError, RolloutError, ServerDraining, ToolFailure
from paddock.rollouts.agents import load_agent
from paddock.rollouts.capture import Upstream
from paddock.rollouts.ledger import recover
from paddock.rollouts.limits import Budget
from paddock.rollouts.masking import Mask
from paddock.rollouts.models import open_model
from paddock.rollouts.outcome import Outcome
from paddock.rollouts.plan import Plan
from paddock.rollouts.record import RolloutRecord
from paddock.rollouts.rollout import Rollout, new_rollout_id
from paddock.rollouts.trace import Event
from paddock.rollouts.unhurried import unhurried

if TYPE_CHECKING:
    from paddock.envs.opencode.request import RolloutRequest
    from paddock.envs.opencode.results import RolloutResult

logger = logging.getLogger("paddock.opencode")

SHUT_DOWN = "the server was shut down"
SHUTDOWN_GRACE = 20.0
"""Seconds for all rollouts to end when the server does."""
ABORT_ANSWERS = 5.0
"""Seconds that an abort waits to tell the outcome; the rollout is stopping in any case."""
LOOK_AGAIN = 1.0
"""Seconds between looks at a rollout that another process runs, or whose event came late."""
MOST_EVENTS = 500


class Desk:
    def __init__(self, settings: Settings, store: WaitingStore, opened: AsyncExitStack) -> None:
        self.settings = settings
        self._store = store
        self._opened = opened
        self._upstream: Upstream | None = None
        self._live: dict[str, Live] = {}
        self._one_by_one = asyncio.Lock()
        self._admissions: set[asyncio.Task[RolloutRecord]] = set()
        self._slots = asyncio.Semaphore(settings.max_rollouts)
        self._closing = False

    @classmethod
    async def open(cls, settings: Settings) -> Desk:
        """With the store recovered: what a killed server left running has its outcome now."""
        async with AsyncExitStack() as opened:
            store = await asyncio.to_thread(WaitingStore.open, settings.store)
            assert isinstance(store, WaitingStore)
            opened.push_async_callback(asyncio.to_thread, store.close)
            found = await store.run(recover, store)
            for rollout_id in found.rollouts:
                await store.run(store.add_event, rollout_id, _outcome_event(Outcome.CANCELLED, None))
            return cls(settings, store, opened.pop_all())

    async def close(self) -> None:
        """Every rollout ends as cancelled, with its sandbox, before the store is closed."""
        self._closing = True
        if self._admissions:
            await asyncio.wait(self._admissions)
        running = list(self._live.values())
        if running:
            await asyncio.gather(*(live.stop(SHUT_DOWN) for live in running))
            _, late = await asyncio.wait([live.task for live in running], timeout=SHUTDOWN_GRACE)
            if late:
                logger.error("%d rollouts did not end in time: the next start gives them their outcome", len(late))
        await self._opened.aclose()

    # -- asking for one ---------------------------------------------------------------------------

    async def start(self, request: RolloutRequest) -> RolloutRecord:
        """A rollout on its way; the one that is there already if its idempotency key was used before."""
        # A caller that leaves half-way must not leave a rollout in the store that nobody runs.
        admission = asyncio.create_task(self._admit(request))
        self._admissions.add(admission)
        admission.add_done_callback(self._admissions.discard)
        return await asyncio.shield(admission)

    async def _admit(self, request: RolloutRequest) -> RolloutRecord:
        async with self._one_by_one:
            if self._closing:
                raise ServerDraining("the server is shutting down", hint="ask another one, or again later")
            if self._upstream is None:
                self._upstream = await self._opened.enter_async_context(Upstream())
            known = await self._same(request)
            if known is not None:
                return known
            record = self._new_record(request)
            await self._store.run(self._store.queue, record)
            live = Live(record, request.secrets)
            self._live[record.rollout_id] = live
            live.task = asyncio.create_task(self._drive(live, request))
            # A task that is cancelled before its first step never runs, and would write no outcome.
            await asyncio.sleep(0)
            return record

    async def _same(self, request: RolloutRequest) -> RolloutRecord | None:
        wanted = request.rollout_id
        if wanted is None:
            return None
        live = self._live.get(wanted)
        known = live.record if live else await self._store.run(self._store.get, wanted)
        if known is None or known.rollout_id != wanted:
            return None
        if known.metadata.get("request") != request.fingerprint:
            raise ToolFailure(f"idempotency_key was used for rollout {wanted} with other arguments: choose a new key")
        return known

    def _new_record(self, request: RolloutRequest) -> RolloutRecord:
        task, model = request.task, request.model
        return RolloutRecord(
            rollout_id=request.rollout_id or new_rollout_id(),
            task_id=task.id,
            task_hash=task.hash,
            instruction=task.instruction,
            driver="serve",
            model=model.name or ("" if "://" in model.spec else model.spec),
            mode=request.mode,
            sandbox=self.settings.sandbox,
            metadata={"request": request.fingerprint},
            started_at=time.time(),
        )

    # -- running it -------------------------------------------------------------------------------

    async def _drive(self, live: Live, request: RolloutRequest) -> None:
        """From the queue to a stored outcome, whatever happens on the way."""
        outcome, error, stored = Outcome.CANCELLED, None, False
        try:
            async with self._slots, asyncio.timeout(request.seconds):
                await self._run(live, request)
            stored = True
        except asyncio.CancelledError:
            error = live.stopped
        except TimeoutError:
            outcome, error = (
                Outcome.ENVIRONMENT,
                f"it did not end within {request.seconds:g} s, all its deadlines together",
            )
        except PaddockError as broken:
            outcome, error = (Outcome.MODEL if live.rollout is None else Outcome.ENVIRONMENT), broken.message
        except Exception as broken:
            logger.exception("rollout %s broke", live.id)
            outcome, error = Outcome.ENVIRONMENT, f"{type(broken).__name__}: {broken}"
        finally:
            await unhurried(self._settle(live, None if stored else outcome, error))

    async def _run(self, live: Live, request: RolloutRequest) -> None:
        assert self._upstream is not None
        model = request.model
        keys: dict[str, Any] = {"name": model.name, "vllm_url": model.vllm_url, "hf_token": model.hf_token}
        await self._enter_stage(live, "model")
        async with open_model(model.spec, **keys) as endpoint:
            plan = Plan(
                load_agent("opencode", driver="serve"),
                endpoint,
                mode=request.mode,
                sandbox=self.settings.sandbox,
                consent=self.settings.consent,
                budget=Budget(max_tokens_per_call=request.max_tokens_cap),
                agent_timeout=request.agent_timeout,
                thinking=request.thinking,
                secrets=request.secrets,
            )
            rollout = Rollout(
                request.task,
                plan,
                store=self._store,
                upstream=self._upstream,
                record=live.record,
                on_change=live.moved,
            )
            await live.follow(rollout)

    async def _enter_stage(self, live: Live, stage: str) -> None:
        live.record.stage = stage
        live.record.started_at = time.time()
        await self._store.run(self._store.update, live.record)
        await self._store.run(self._store.add_event, live.id, Event(time.time(), "stage", {"stage": stage}))
        live.moved()

    async def _settle(self, live: Live, outcome: Outcome | None, error: str | None) -> None:
        """Write the outcome of a rollout that could not write its own, and let it go."""
        record = live.record
        try:
            if outcome is not None:
                if not record.finished:
                    record.outcome = outcome
                    record.error = None if error is None else Mask(live.secrets).text(error)
                    record.reward_reason = record.reward_reason or f"not verified: outcome {outcome}"
                record.finished_at = record.finished_at or time.time()
                record.stage = "done"
                if await self._store.run(self._store.finish, record):
                    event = _outcome_event(record.outcome, record.reward)
                    await self._store.run(self._store.add_event, live.id, event)
        except RolloutError as broken:
            # It stays among the live ones, so that whoever asks is told all the same.
            logger.error("the outcome of rollout %s is not stored: %s", live.id, broken)
        else:
            del self._live[live.id]
        live.end()

    # -- asking about one -------------------------------------------------------------------------

    @property
    def is_closing(self) -> bool:
        return self._closing

    async def record(self, rollout_id: str) -> RolloutRecord:
        """Where it stands. Raises ToolFailure for an id that nobody knows."""
        live = self._live.get(rollout_id)
        if live is not None:
            return live.record
        found = await self._store.run(self._store.get, rollout_id)
        if found is None:
            raise UnknownRollout(
                f"there is no rollout {rollout_id!r} here: use the rollout_id that start_rollout gave"
            )
        return found

    async def wait(self, rollout_id: str, seconds: float) -> RolloutRecord:
        """Its record once it has ended, or as it stands after `seconds`."""
        deadline = time.monotonic() + seconds
        record = await self.record(rollout_id)
        while not record.finished or record.rollout_id in self._live:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            live = self._live.get(record.rollout_id)
            if live is not None and live.ended.is_set():
                break
            await _until(live.ended if live else None, left if live else min(left, LOOK_AGAIN))
            record = await self.record(record.rollout_id)
        return record

    async def result(self, record: RolloutRecord) -> RolloutResult:
        """All that an ended rollout left behind, from the store."""

        def read() -> RolloutResult:
            return result_of(record, self._store.calls(record.rollout_id))

        return await self._store.run(read)

    async def messages(self, rollout_id: str) -> tuple[RolloutRecord, list[dict[str, Any]]]:
        """The agent's own transcript: live while it runs, from the store afterwards."""
        record = await self.record(rollout_id)
        live = self._live.get(record.rollout_id)
        if live is None or live.rollout is None:
            return record, record.transcript
        return record, Mask(live.secrets).value(await live.rollout.messages())

    async def abort(self, rollout_id: str) -> RolloutRecord:
        """Stop it, and tell what became of it. Does nothing to one that has ended."""
        record = await self.record(rollout_id)
        live = self._live.get(record.rollout_id)
        if live is not None:
            await live.stop("aborted")
            return await self.wait(record.rollout_id, ABORT_ANSWERS)
        if not record.finished:
            raise ToolFailure(f"rollout {record.rollout_id} runs in another process: abort it there")
        return record

    async def events(self, rollout_id: str, after: int, seconds: float) -> tuple[list[dict[str, Any]], bool]:
        """Events numbered above `after`, and whether none can follow. Waits up to `seconds` for the first."""
        deadline = time.monotonic() + seconds
        record = await self.record(rollout_id)
        while True:
            live = self._live.get(record.rollout_id)
            changed = live.changed if live else None
            # Asked before the events are read: what is written in between would be missed otherwise.
            over = live is None and (await self.record(record.rollout_id)).finished
            found = await self._store.run(self._store.events, record.rollout_id, after, MOST_EVENTS)
            left = deadline - time.monotonic()
            if found or over or left <= 0 or self._closing:
                shown = [{"seq": number, "at": e.at, "kind": e.kind, "data": e.data} for number, e in found]
                return shown, over and len(found) < MOST_EVENTS
            await _until(changed, min(left, LOOK_AGAIN))


class UnknownRollout(ToolFailure, LookupError):
    http_status = 404


def _outcome_event(outcome: Outcome | None, reward: float | None) -> Event:
    return Event(time.time(), "outcome", {"outcome": outcome, "reward": reward})


async def _until(happened: asyncio.Event | None, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await (happened.wait() if happened is not None else asyncio.sleep(seconds))


# -- the desk of this process -------------------------------------------------------------------------

_desks: dict[asyncio.AbstractEventLoop, asyncio.Task[Desk]] = {}


async def desk_here() -> Desk:
    """The desk of the running loop, opened by whoever needs it first. A failed opening is tried again."""
    loop = asyncio.get_running_loop()
    opening = _desks.get(loop)
    if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
        opening = _desks[loop] = loop.create_task(Desk.open(read_settings()))
    return await asyncio.shield(opening)


async def close_desk_here() -> None:
    opening = _desks.pop(asyncio.get_running_loop(), None)
    if opening is not None:
        with suppress(PaddockError):
            await (await opening).close()
