"""Which task of a source comes next. A place gives the same task in every process, so a stream can go on."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from paddock.errors import ConfigError
from paddock.train.stream_state import StreamUnit

if TYPE_CHECKING:
    from paddock.tasks.task import Task
    from paddock.train.sources import Source
    from paddock.train.stream_config import StreamConfig


class TaskOrder:
    """Goes through the tasks of a source, round after round, from the place `used` on. If the stream delivers single
    rollouts, the members of a group have a place each."""

    def __init__(self, source: Source, stream: str, config: StreamConfig, used: int) -> None:
        if not len(source.tasks):
            raise ConfigError(f"the source {source.name!r} has no tasks", hint="Source(tasks=…)")
        self.used = used
        """Places that have been used."""
        self._source = source
        self._stream = stream
        self._members = source.config.n if config.deliver == "rollout" else None
        places = len(source.tasks) * (self._members or 1)
        self._last = None if config.rounds is None else config.rounds * places
        self._seed = config.shuffle_seed
        self._round = -1
        self._indices: list[int] = []

    @property
    def is_finished(self) -> bool:
        return self._last is not None and self.used >= self._last

    def next_unit(self, number: int) -> StreamUnit:
        place, self.used = self.used, self.used + 1
        return self._unit(number, place, 0)

    def repeat(self, unit: StreamUnit, number: int) -> StreamUnit:
        """The same unit once more, as new rollouts."""
        return self._unit(number, unit.place, unit.attempt + 1)

    def task(self, unit: StreamUnit) -> Task:
        """Raises ConfigError if the tasks are not those with which the unit was started."""
        task = self._task_at(unit.place)
        if task.id != unit.task_id:
            raise ConfigError(
                f"unit {unit.number} of the stream {self._stream} was started with the task {unit.task_id}, "
                f"and the source {self._source.name!r} now has {task.id} there",
                hint="give the stream the same tasks, or another name",
            )
        return task

    def _unit(self, number: int, place: int, attempt: int) -> StreamUnit:
        group, member = (place, None) if self._members is None else divmod(place, self._members)
        again = f".{attempt}" if attempt else ""
        return StreamUnit(
            number=number,
            source=self._source.name,
            place=place,
            task_id=self._task_at(place).id,
            batch_id=f"{self._stream}.{self._source.name}.{group}{again}",
            member=member,
            attempt=attempt,
        )

    def _task_at(self, place: int) -> Task:
        tasks = self._source.tasks
        number, index = divmod(place // (self._members or 1), len(tasks))
        if self._seed is None:
            return tasks[index]
        if number != self._round:
            self._round, self._indices = number, list(range(len(tasks)))
            random.Random(f"{self._seed}/{number}").shuffle(self._indices)
        return tasks[self._indices[index]]
