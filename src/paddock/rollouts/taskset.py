"""Many tasks as one sequence, and what a user may name on the command line.

A set knows the ids of its tasks and where each one is; the files of a task are read when it is asked
for, and not kept. Tasks that were given as values are the exception.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from paddock import tasks as shipped_tasks
from paddock.errors import TaskError
from paddock.rollouts.limits import MEBIBYTE
from paddock.rollouts.task import Task
from paddock.rollouts.task_folder import is_task_folder, read_task_folder, task_folder_id

if TYPE_CHECKING:
    from collections.abc import Iterable

SHIPPED = "shipped"
LONGEST_LINE = 512 * MEBIBYTE


@dataclass(frozen=True, slots=True)
class _Given:
    id: str
    place: str
    task: Task

    def load(self) -> Task:
        return self.task


@dataclass(frozen=True, slots=True)
class _InFolder:
    id: str
    place: str

    def load(self) -> Task:
        return read_task_folder(self.place)


@dataclass(frozen=True, slots=True)
class _InLine:
    id: str
    place: str
    file: Path
    offset: int
    length: int

    def load(self) -> Task:
        with self.file.open("rb") as file:
            file.seek(self.offset)
            return Task.from_json(_parsed(file.read(self.length), self.place), source=self.place)


_Entry = _Given | _InFolder | _InLine


class TaskSet(Sequence[Task]):
    """Tasks with different ids, in order. Raises TaskError when two have the same id."""

    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        self._entries = _unique([_Given(task.id, task.source or "a given task", task) for task in tasks])

    @classmethod
    def from_folder(cls, path: str | Path) -> TaskSet:
        """One task folder, or a folder of task folders, in the order of their names."""
        root = Path(path)
        if not root.is_dir():
            raise TaskError(f"{root} is not a folder", hint="name a task folder, or a folder of task folders")
        folders = (
            [root] if is_task_folder(root) else [child for child in sorted(root.iterdir()) if is_task_folder(child)]
        )
        if not folders:
            raise TaskError(
                f"{root} holds no task", hint="a task is a folder with instruction.md; name it or the folder above it"
            )
        return cls._of([_InFolder(task_folder_id(folder), str(folder)) for folder in folders])

    @classmethod
    def from_jsonl(cls, path: str | Path) -> TaskSet:
        """A file with one task in its JSON form on each line. Every line is checked now."""
        file = Path(path)
        entries: list[_Entry] = []
        offset = 0
        with _opened(file) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE), b""), start=1):
                place = f"{file}:{number}"
                if line.strip():
                    task = Task.from_json(_parsed(line, place), source=place)
                    entries.append(_InLine(task.id, place, file, offset, len(line)))
                offset += len(line)
        if not entries:
            raise TaskError(f"{file} holds no task", hint='write one {"instruction": "…"} on each line')
        return cls._of(entries)

    @classmethod
    def from_json(cls, path: str | Path) -> TaskSet:
        """A file with one task in its JSON form, or a list of them."""
        file = Path(path)
        with _opened(file) as opened:
            data = _parsed(opened.read(), str(file))
        found = data if isinstance(data, list) else [data]
        if not found:
            raise TaskError(f"{file} holds no task", hint='write {"instruction": "…"} or a list of such objects')
        places = [f"{file}[{index}]" if isinstance(data, list) else str(file) for index in range(len(found))]
        return cls(Task.from_json(item, source=place) for item, place in zip(found, places, strict=True))

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(entry.id for entry in self._entries)

    def select(self, ids: Iterable[str]) -> TaskSet:
        """The tasks with these ids, in the order asked for. Raises TaskError for an id that is not here."""
        known = {entry.id: entry for entry in self._entries}
        wanted = list(ids)
        for name in wanted:
            if name not in known:
                raise TaskError(f"there is no task {name!r} in this set", hint=_nearest(name, list(known)))
        return self._of([known[name] for name in wanted])

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> TaskSet: ...
    def __getitem__(self, index: int | slice) -> Task | TaskSet:
        if isinstance(index, slice):
            return self._of(self._entries[index])
        entry = self._entries[index]
        task = entry.load()
        if task.id != entry.id:
            raise TaskError(f"{entry.place} now holds {task.id!r}, not {entry.id!r}", hint="read the set again")
        return task

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"TaskSet({len(self)} tasks)"

    @classmethod
    def _of(cls, entries: Sequence[_Entry]) -> TaskSet:
        made = cls()
        made._entries = _unique(entries)
        return made


def load_tasks(spec: str | Path) -> list[Task]:
    """The tasks that a user names.

    A task folder, a folder of task folders, a .jsonl or .json file, the name of a shipped task, or
    `shipped` for all of those. A bare name is a shipped task first: write `./name` for a folder.
    """
    shipped = shipped_tasks.shipped()
    if isinstance(spec, str):
        if spec == SHIPPED:
            return [read_task_folder(folder) for folder in shipped.values()]
        if spec in shipped:
            return [read_task_folder(shipped[spec])]
    path = Path(spec).expanduser()
    if path.is_dir():
        return list(TaskSet.from_folder(path))
    if path.is_file():
        if path.suffix == ".jsonl":
            return list(TaskSet.from_jsonl(path))
        if path.suffix == ".json":
            return list(TaskSet.from_json(path))
        raise TaskError(f"{path} is not a task", hint="name a task folder, or a .jsonl or .json file")
    near = [SHIPPED, *shipped]
    if path.parent.is_dir():
        near += [str(path.with_name(entry.name)) for entry in path.parent.iterdir()]
    raise TaskError(f"there is no task {str(spec)!r}", hint=_nearest(str(spec), near, list(shipped)))


def _nearest(name: str, candidates: list[str], shown: list[str] | None = None) -> str:
    close = difflib.get_close_matches(name, candidates, 3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    some = (candidates if shown is None else shown)[:10]
    return f"{'known' if shown is None else 'shipped'}: {', '.join(some)}"


def _unique(entries: Sequence[_Entry]) -> list[_Entry]:
    seen: dict[str, _Entry] = {}
    for entry in entries:
        if entry.id in seen:
            raise TaskError(
                f"two tasks have the id {entry.id!r}: {seen[entry.id].place} and {entry.place}",
                hint="give each task its own id",
            )
        seen[entry.id] = entry
    return list(entries)


def _opened(file: Path) -> Any:
    try:
        return file.open("rb")
    except OSError as error:
        raise TaskError(f"{file} cannot be read: {error.strerror}", hint="name a readable file") from error


def _parsed(data: bytes, place: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{place} is not valid JSON: {error}", hint="correct the text there") from error
