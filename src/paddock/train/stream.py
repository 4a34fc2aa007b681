"""A stream of scored rollouts for a trainer, in the order in which they finish.

    async with Stream([Source.create(url, tasks, n=8, agent="opencode")], StreamConfig(batch_size=16)) as stream:
        while groups := await stream.take():
            ...                                        # train on group.samples, with group.advantage(sample)
            await stream.acknowledge()
            await stream.update_weights(stream.version + 1, load)

Any number of sources feed it. New groups start while `pacing` allows it, so none is too old when the trainer takes
it, and finished ones are never discarded. `stream_state` keeps what was started, delivered and acknowledged: a stream
of the same name goes on there. Knows no trainer.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from paddock.capture.gate import CallGate
from paddock.errors import ConfigError, PaddockError, StreamError
from paddock.models.weight_version import Weights
from paddock.rollouts.batch import new_batch_id
from paddock.shielded import run_shielded
from paddock.sqlite import WorkerThread
from paddock.train.pacing import Pacing
from paddock.train.sampled import TOO_OLD, ZERO_ADVANTAGE, ScoredGroup
from paddock.train.sources import Source, open_sources
from paddock.train.stream_config import StreamConfig, StreamStatistics
from paddock.train.stream_state import StreamState, StreamUnit, UnitRollout
from paddock.train.task_order import TaskOrder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from paddock.capture.gate import InFlight, PauseReport
    from paddock.train.sampled import SampledRollout
    from paddock.train.sources import OpenSource
    from paddock.train.stream_state import SavedStream

logger = logging.getLogger("paddock.train")


class Stream:
    """Use it as `async with`, then as `async for`. `version` is the trainer's weight version at the start; None goes
    on with the stored one, or 0."""

    def __init__(
        self,
        sources: Source | Sequence[Source],
        config: StreamConfig | None = None,
        *,
        version: int | None = None,
    ) -> None:
        if config is not None and not isinstance(config, StreamConfig):
            raise ConfigError(
                f"the config of a stream has the type {type(config).__name__}",
                hint="give StreamConfig(…); a RunConfig goes into Source.create(RunConfig(…), tasks)",
            )
        self.config = config or StreamConfig()
        self.name = self.config.name or new_batch_id()
        self._sources = _list_sources(sources)
        self.start_version = version
        self._weights = Weights(version or 0)
        self._gate = CallGate()
        self._stack = AsyncExitStack()
        self._open: dict[str, OpenSource] = {}
        self._orders: dict[str, TaskOrder] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ready: dict[int, ScoredGroup] = {}
        """Finished units, in the order in which they finished."""
        self._delivered: dict[int, ScoredGroup] = {}
        """Units that were not acknowledged yet."""
        self._again: deque[StreamUnit] = deque()
        """Units that start before new ones: they had no signal."""
        self._left_out: Counter[str] = Counter()
        self._staleness: Counter[int] = Counter()
        self._delivered_rollouts = self._acknowledged = self._resampled = 0
        self._failures = self._too_old = 0
        """Rollouts in a row without a reward, and rollouts in a row that were too old."""
        self._last_versions: tuple[int | None, int | None] = (None, None)
        self.failure: Exception | None = None
        """Why the stream cannot go on; None if it can."""
        self._last_change = time.monotonic()
        self._changed = asyncio.Event()
        """Replaced whenever something changes that somebody may wait for."""

    # -- its lifetime -------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._open = await stack.enter_async_context(open_sources(self._sources, self._weights, self._gate))
            store = self._open[self._sources[0].name].store
            self._worker = WorkerThread("paddock-stream")
            stack.callback(self._worker.close)
            self._state = await self._worker.run(lambda: StreamState(store.path, self.name))
            # On the thread, so that what was begun before is written first.
            stack.push_async_callback(self._worker.run, self._state.close)
            saved = await self._worker.run(lambda: self._state.open(self._describe(), self.start_version))
            self._restore(saved)
            scheduler = asyncio.create_task(self._schedule())
            stack.push_async_callback(self._stop, scheduler)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *problem: Any) -> None:
        """Cancel what runs. It starts again when the stream goes on."""
        await run_shielded(self._close(*problem))

    async def _close(self, *problem: Any) -> None:
        await self._stack.__aexit__(*problem)

    async def _stop(self, scheduler: asyncio.Task[None]) -> None:
        tasks = [scheduler, *self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _describe(self) -> dict[str, Any]:
        """What may not change when the stream goes on: the unit of a place would be another one."""
        sources = {each.name: {"n": each.config.n, "tasks": len(each.tasks)} for each in self._sources}
        return {"deliver": self.config.deliver, "shuffle_seed": self.config.shuffle_seed, "sources": sources}

    def _restore(self, saved: SavedStream) -> None:
        config = self.config
        self._weights.set(saved.version)
        self._pacing = Pacing(
            batch_size=config.batch_size,
            max_staleness=config.max_staleness,
            max_ready=config.max_ready or 2 * config.batch_size,
            version=saved.version,
            taken=saved.taken,
        )
        self._number = saved.next_number
        self._acknowledged = saved.acknowledged
        self._left_out.update(saved.left_out)
        for source in self._sources:
            used = saved.places.get(source.name, 0)
            self._orders[source.name] = TaskOrder(source, self.name, config, used)
        for each in saved.open_units:
            self._pacing.start(each.unit.number, each.oldest)
            self._spawn(each.unit)
        for unit in saved.without_signal:
            self._repeat(unit)

    # -- what the trainer calls ---------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ScoredGroup:
        """The next unit. Raises StreamError if the stream failed, or none is there in time; StopAsyncIteration after
        the last one."""
        try:
            async with asyncio.timeout(self.config.timeout):
                while (number := self._next_ready()) is None:
                    if self.failure is not None:
                        raise self._failed(self.failure) from self.failure
                    if self._is_finished:
                        raise StopAsyncIteration
                    await self._changed.wait()
        except TimeoutError:
            raise self._starved() from None
        return await self._take(number)

    async def take(self, count: int | None = None) -> list[ScoredGroup]:
        """The next `count` units; fewer at the end of the stream. Without a count: the units for one update of the
        weights, which are `batch_size`, and more if others are due (see `due`).

        If it is cancelled or raises, the units that it had taken are the next ones again."""
        groups: list[ScoredGroup] = []
        try:
            while len(groups) < (count or self.config.batch_size) or (count is None and self.due(self.version + 1)):
                groups.append(await anext(self))
        except StopAsyncIteration:
            pass
        except BaseException:
            self._take_back(groups)
            raise
        return groups

    async def acknowledge(self, *groups: ScoredGroup) -> None:
        """These were trained on, and the trainer has saved that: they never come again. Without groups: all that were
        delivered."""
        numbers = [group.number for group in groups] or list(self._delivered)
        await self._worker.run(lambda: self._state.acknowledge(numbers))
        for number in numbers:
            if self._delivered.pop(number, None) is not None:
                self._acknowledged += 1

    async def pause(self, in_flight: InFlight = "finish", timeout: float | None = None) -> PauseReport:
        """Start no rollout and no model call until `resume`, and wait until no call is at the inference engine.

        Calls at the engine finish, or are asked again after `resume` (`abort`). Pauses can be nested."""
        return await self._gate.pause(in_flight, timeout)

    async def resume(self, weight_version: int | None = None) -> None:
        """End a pause: set the weight version, unless it is None, then go on."""
        try:
            if weight_version is not None:
                await self.set_version(weight_version)
        finally:
            self._gate.resume()
            self._notify()

    async def update_weights(
        self,
        version: int,
        load: Callable[[], Awaitable[None] | None] | None = None,
        *,
        in_flight: InFlight = "finish",
        timeout: float | None = None,
    ) -> None:
        """The model has the weights `version` from now on. `load` loads them, while the stream is paused.

        Raises StreamError, before anything is loaded, if the trainer has to take more units first (see `due`), or if
        calls are still at the engine after `timeout` seconds.
        """
        if due := self.due(version):
            raise StreamError(
                f"version {version} would make {due} units older than {self.config.max_staleness} versions",
                hint=f"take them first: a batch has {self.config.batch_size} units, and `due(version)` counts them",
                due=due,
            )
        if load is None:
            await self.set_version(version)
            return
        report = await self.pause(in_flight, timeout)
        try:
            if report.in_flight:
                raise StreamError(f"{report.in_flight} calls are still at the engine", hint="use in_flight='abort'")
            if inspect.isawaitable(loading := load()):
                await loading
        except BaseException:
            await self.resume()
            raise
        await self.resume(version)

    async def set_version(self, version: int) -> None:
        """The trainer has updated the weights already. Calls that begin from now on record this version."""
        self._weights.set(version)
        self._pacing.advance(version)
        self._notify()
        await self._worker.run(lambda: self._state.set_version(version))
        for number in list(self._ready):
            await self._drop_too_old(number)

    @property
    def version(self) -> int:
        """The trainer's weight version."""
        return self._pacing.version

    def due(self, version: int) -> int:
        """How many units the trainer has to take before it may go on to `version`, so that none gets too old. After
        `batch_size` units it is 0, unless units came again that an earlier process did not acknowledge."""
        return self._pacing.due(version)

    async def report(self, version: int | None = None, **figures: float) -> None:
        """Keep figures of the trainer for the page: `entropy`, `logprob_difference`, `loss`, `seconds`, …"""
        at = self._pacing.version if version is None else version
        values = {name: float(value) for name, value in figures.items()}
        await self._worker.run(lambda: self._state.report(at, values))

    @property
    def idle_seconds(self) -> float:
        """How long nothing has happened, while the trainer could not go on. 0 if a unit is ready."""
        return 0.0 if self._ready else time.monotonic() - self._last_change

    @property
    def ready_samples(self) -> int:
        """Samples of the units that wait for the trainer."""
        return sum(len(group.samples) for group in self._ready.values())

    def statistics(self) -> StreamStatistics:
        """The stream as of now: what runs, what is ready and what was delivered."""
        return StreamStatistics(
            name=self.name,
            version=self._pacing.version,
            # A task lives a little longer than its unit runs.
            running=len(self._pacing.oldest) - len(self._ready),
            ready=len(self._ready),
            delivered=self._delivered_rollouts,
            acknowledged=self._acknowledged,
            unacknowledged=len(self._delivered),
            resampled=self._resampled,
            left_out=dict(self._left_out),
            staleness=dict(sorted(self._staleness.items())),
            oldest_call=self._last_versions[0],
            newest_call=self._last_versions[1],
            paused=self._gate.is_paused,
        )

    # -- delivery -----------------------------------------------------------------------------------

    def _next_ready(self) -> int | None:
        pacing = self._pacing
        takeable = (number for number in self._ready if pacing.can_take(number) and not pacing.is_too_old(number))
        return next(takeable, None)

    @property
    def _is_finished(self) -> bool:
        is_idle = not self._pacing.oldest and not self._again
        return is_idle and all(order.is_finished for order in self._orders.values())

    async def _take(self, number: int) -> ScoredGroup:
        pacing, version = self._pacing, self._pacing.version
        group, oldest = self._ready.pop(number), pacing.oldest[number]
        staleness = pacing.take(number)
        self._notify()
        try:
            await self._worker.run(lambda: self._state.deliver(number, version, staleness))
        except BaseException:
            # The caller does not get it, so it is the next one again.
            self._ready = {number: group, **self._ready}
            pacing.give_back(number, oldest, version)
            self._notify()
            raise
        group = self._delivered[number] = group.delivered(version, staleness)
        self._delivered_rollouts += len(group.rollouts)
        self._too_old = 0
        self._staleness[staleness] += 1
        self._last_versions = group.versions or (None, None)
        return group

    def _take_back(self, groups: Sequence[ScoredGroup]) -> None:
        """Undo the delivery of units that nobody got."""
        for group in groups:
            del self._delivered[group.number]
            self._delivered_rollouts -= len(group.rollouts)
            self._staleness -= Counter((group.staleness,))
            self._pacing.give_back(group.number, group.version - group.staleness, group.version)
        self._ready = {**{group.number: group for group in groups}, **self._ready}
        self._notify()

    def _failed(self, failure: Exception) -> StreamError:
        return StreamError(f"the stream {self.name} failed: {failure}", hint=getattr(failure, "hint", None))

    def _starved(self) -> StreamError:
        statistics = self.statistics()
        hint = "see `paddock view` for what the rollouts do"
        if not self._running:
            hint = f"a trainer that takes more than batch_size={self.config.batch_size} units has to update first"
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._left_out.most_common())
        return StreamError(
            f"nothing to train on for {self.config.timeout:g} s: {statistics.running} units run, "
            f"{statistics.ready} wait for older ones, {self._left_out.total()} rollouts were left out"
            + (f" ({reasons})" if reasons else ""),
            hint=hint,
        )

    # -- rollouts -----------------------------------------------------------------------------------

    async def _schedule(self) -> None:
        """Start units while it is allowed, until cancelled."""
        try:
            while True:
                unit = self._next_unit()
                if unit is None:
                    await self._changed.wait()
                    continue
                version = self._pacing.version
                self._pacing.start(unit.number)
                await self._worker.run(lambda unit=unit, version=version: self._state.start(unit, version))  # type: ignore[misc]
                self._spawn(unit)
                # It takes its slots in its first turn on the loop.
                await asyncio.sleep(0)
        except Exception as error:
            self._fail(error)

    def _next_unit(self) -> StreamUnit | None:
        """The unit to start now: one to resample, or one of the source that is furthest behind its share."""
        if self._gate.is_paused or self.failure is not None or not self._pacing.can_start():
            return None
        for unit in self._again:
            if self._open[unit.source].has_free_slot:
                self._again.remove(unit)
                return unit
        free = [name for name, order in self._orders.items() if not order.is_finished]
        free = [name for name in free if self._open[name].has_free_slot]
        if not free:
            return None
        chosen = min(free, key=lambda name: self._orders[name].used / self._open[name].source.weight)
        return self._orders[chosen].next_unit(self._take_number())

    def _take_number(self) -> int:
        self._number += 1
        return self._number - 1

    def _spawn(self, unit: StreamUnit) -> None:
        task = self._running[unit.number] = asyncio.create_task(self._run(unit))
        task.add_done_callback(lambda _: self._forget(unit.number))

    def _forget(self, number: int) -> None:
        del self._running[number]
        self._notify()

    async def _run(self, unit: StreamUnit) -> None:
        source = self._open[unit.source]
        try:
            task = self._orders[unit.source].task(unit)
            rollouts = await source.run(
                [task],
                n=source.source.config.n,
                batch_id=unit.batch_id,
                members=None if unit.member is None else (unit.member,),
                on_settled=self._notify,
            )
            self._check_failures(source, rollouts)
            policy, max_tokens = source.source.policy, self.config.max_tokens
            left_out = [each.left_out_because(policy, max_tokens) for each in rollouts]
            rewards = [each.record.reward for each in rollouts if each.record.reward is not None]
            trainable = [each for each, reason in zip(rollouts, left_out, strict=True) if reason is None]
            group = ScoredGroup(unit.number, unit.source, task, trainable, rewards, is_whole=unit.member is None)
            if group.rollouts and not group.has_signal and self._needs_signal:
                left_out = [reason or ZERO_ADVANTAGE for reason in left_out]
            await self._settle(unit, group, rollouts, left_out)
        except PaddockError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("unit %s of the stream %s broke", unit.number, self.name)
            self._fail(error)

    @property
    def _needs_signal(self) -> bool:
        return self.config.deliver == "group" and self.config.zero_advantage != "keep"

    async def _settle(
        self,
        unit: StreamUnit,
        group: ScoredGroup,
        rollouts: Sequence[SampledRollout],
        left_out: Sequence[str | None],
    ) -> None:
        """Put a finished unit among those that can be taken, or leave it out."""
        is_ready = None in left_out
        rows = [UnitRollout.of(each, reason) for each, reason in zip(rollouts, left_out, strict=True)]
        state = "ready" if is_ready else "dropped"
        await self._worker.run(lambda: self._state.finish(unit.number, state, group.versions, rows))  # type: ignore[arg-type]
        self._left_out.update(reason for reason in left_out if reason is not None)
        if is_ready:
            self._pacing.finish(unit.number, None if group.versions is None else group.versions[0])
            self._ready[unit.number] = group
            await self._drop_too_old(unit.number)
        else:
            self._pacing.drop(unit.number)
            if ZERO_ADVANTAGE in left_out:
                self._repeat(unit)
        self._notify()

    def _repeat(self, unit: StreamUnit) -> None:
        """Run a unit without signal again, if the config says so."""
        if self.config.zero_advantage == "resample" and unit.attempt < self.config.max_resamples:
            self._again.append(self._orders[unit.source].repeat(unit, self._take_number()))
            self._resampled += 1

    async def _drop_too_old(self, number: int) -> None:
        """Leave out a finished unit if the limit no longer allows it. Pacing prevents this, unless versions jump."""
        if number not in self._ready or not self._pacing.is_too_old(number):
            return
        group, oldest = self._ready.pop(number), self._pacing.oldest[number]
        self._pacing.drop(number)
        self._left_out[TOO_OLD] += len(group.rollouts)
        self._too_old += len(group.rollouts)
        if self._too_old >= self.config.max_failures:
            hint = "check that the engine counts its versions as the trainer does"
            self._fail(StreamError(f"{self._too_old} rollouts in a row were too old", hint=hint))
        version = self._pacing.version
        logger.warning("%s is left out: its oldest call is of version %s, now %s", group.task.id, oldest, version)
        self._notify()
        await self._worker.run(lambda: self._state.drop(number, TOO_OLD))

    def _check_failures(self, source: OpenSource, rollouts: Sequence[SampledRollout]) -> None:
        """Raises StreamError if a dependency is down for good, or nothing gets a reward any more."""
        if (failure := source.breaker.failure) is not None:
            raise StreamError(f"the source {source.source.name!r} is down: {failure.error}")
        for rollout in rollouts:
            self._failures = 0 if rollout.record.reward is not None else self._failures + 1
            if self._failures >= self.config.max_failures:
                reason = rollout.record.error or rollout.record.reward_reason
                raise StreamError(
                    f"{self._failures} rollouts in a row have no reward; the last ended with "
                    f"{rollout.record.outcome}: {reason}",
                    hint=f"paddock trace show {rollout.record.rollout_id}",
                )

    def _fail(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
        self._notify()

    def _notify(self) -> None:
        """Wake up everybody who waits for a change."""
        self._last_change = time.monotonic()
        self._changed.set()
        self._changed = asyncio.Event()


def _list_sources(sources: Source | Sequence[Source]) -> list[Source]:
    listed = list(sources) if isinstance(sources, Iterable) else [sources]
    for each in listed:
        if not isinstance(each, Source):
            raise ConfigError(f"{each!r} is not a Source", hint="make one with Source.create(model, tasks)")
    return listed
