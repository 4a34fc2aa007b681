"""Many tasks as one sequence, and what a user may name on the command line.

A set knows the ids of its tasks and where each one is. The files of a task are read each time the task is taken from
the set. Tasks that were passed as values stay in memory.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from paddock.errors import TaskError
from paddock.limits import MEBIBYTE
from paddock.tasks import shipped as shipped_tasks
from paddock.tasks.datasets.packages.manifest import MANIFEST
from paddock.tasks.datasets.packages.store import is_package_name
from paddock.tasks.datasets.resolve import (
    SetOptions,
    knows_datasets,
    resolve_dataset,
    resolve_git,
    resolve_manifest,
)
from paddock.tasks.datasets.source import (
    GIT,
    SWEBENCH,
    DatasetSource,
    GitSource,
    SwebenchSource,
    parse_dataset_name,
    parse_source,
)
from paddock.tasks.json_values import parse_json
from paddock.tasks.requirements import MISSING_FILES, UNREADABLE
from paddock.tasks.task import Task
from paddock.tasks.task_folder import is_task_folder, read_task_folder, task_folder_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paddock.tasks.datasets.resolve import ResolvedPlace

SHIPPED = "shipped"
TASK_SET = "task_set"
"""The metadata of a task that says which set it is from: `set` and `hash`, `commit` if it was fetched with git,
`digest` and `package` if it was published."""
SUFFIXES = (".json", ".jsonl")
UNREADABLE_INSTRUCTION = "This task cannot be read."
MAX_LINE_BYTES = 512 * MEBIBYTE


@dataclass(frozen=True, slots=True)
class _InMemory:
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
        """The task. One that cannot be read is refused when it is run, so that the others of a set can be used."""
        try:
            return read_task_folder(self.place)
        except TaskError as error:
            problem = {UNREADABLE: {"message": error.message, "hint": error.hint}}
            return Task(UNREADABLE_INSTRUCTION, id=self.id, metadata=problem, source=self.place)


def _folder_id(folder: Path) -> str:
    try:
        return task_folder_id(folder)
    except TaskError:
        return folder.resolve().name


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
            return Task.from_json(parse_json(file.read(self.length), self.place), source=self.place)


_Entry = _InMemory | _InFolder | _InLine


class TaskSet(Sequence[Task]):
    """Tasks with different ids, in order. Raises TaskError when two have the same id."""

    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        self._entries = _unique([_InMemory(task.id, task.source or "a task in memory", task) for task in tasks])

    @classmethod
    def from_folder(cls, path: str | Path) -> TaskSet:
        """One task folder, or a folder of task folders, in the order of their names."""
        root = Path(path)
        if not root.is_dir():
            raise TaskError(f"{root} is not a folder", hint="name a task folder, or a folder of task folders")
        if is_task_folder(root):
            return cls._of([_InFolder(_folder_id(root), str(root))])
        folders = [child for child in sorted(root.iterdir()) if is_task_folder(child)]
        if not folders:
            has_manifest = (root / MANIFEST).is_file()
            raise TaskError(
                f"{root} holds no task",
                hint=f"name {root / MANIFEST} for the tasks that it lists"
                if has_manifest
                else "a task is a folder with instruction.md; name it or the folder above it",
            )
        return cls._of([_InFolder(_folder_id(folder), str(folder)) for folder in folders])

    @classmethod
    def from_jsonl(cls, path: str | Path) -> TaskSet:
        """A file with one task in its JSON form on each line. Every line is checked now."""
        file = Path(path)
        entries: list[_Entry] = []
        offset = 0
        with _opened(file) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES), b""), start=1):
                place = f"{file}:{number}"
                if line.strip():
                    task = Task.from_json(parse_json(line, place), source=place)
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
            data = parse_json(opened.read(), str(file))
        items = data if isinstance(data, list) else [data]
        if not items:
            raise TaskError(f"{file} holds no task", hint='write {"instruction": "…"} or a list of such objects')
        places = [f"{file}[{index}]" if isinstance(data, list) else str(file) for index in range(len(items))]
        return cls(Task.from_json(item, source=place) for item, place in zip(items, places, strict=True))

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the tasks, in order."""
        return tuple(entry.id for entry in self._entries)

    def select(
        self,
        ids: Iterable[str] | None = None,
        *,
        pattern: str | None = None,
        shard: str | None = None,
        limit: int | None = None,
    ) -> TaskSet:
        """A part of the set: `ids` in the order asked for, then `pattern`, then `shard`, then the first `limit`.

        `pattern` is a glob for the whole id, or `/regex/` for a part of it. `shard` is `K/N`: of the tasks in the
        order of their ids, each N-th from the K-th. The N shards of a set have no task in common, and together they
        are the set. Raises TaskError for an id that is not here and for a value that cannot be read.
        """
        entries = self._entries if ids is None else self._named(ids)
        if pattern is not None:
            matches = _matcher(pattern)
            entries = [entry for entry in entries if matches(entry.id)]
        if shard is not None:
            number, count = _parse_shard(shard)
            members = set(sorted(entry.id for entry in entries)[number - 1 :: count])
            entries = [entry for entry in entries if entry.id in members]
        if limit is not None and limit < 1:
            raise TaskError(f"the limit is {limit}", hint="give at least 1")
        return self._of(entries[:limit])

    def _named(self, ids: Iterable[str]) -> list[_Entry]:
        entries = {entry.id: entry for entry in self._entries}
        chosen = list(ids)
        for name in chosen:
            if name not in entries:
                raise TaskError(f"there is no task {name!r} in this set", hint=_nearest(name, list(entries)))
        return [entries[name] for name in chosen]

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


def load_tasks(spec: str | Path, options: SetOptions | None = None) -> list[Task]:
    """The tasks of the set that a user names, each with the set and its hash in `metadata["task_set"]`.

    A task folder, a folder of task folders, a .jsonl or .json file, a dataset.toml, the name of a shipped task,
    `shipped` for all of those, `git+URL@REV#PATH`, `swebench:FILE`, `NAME@VERSION` of a registry, or `ORG/NAME@REF`
    of a package store. A bare name is a shipped task first: write `./name` for a folder. Raises TaskError.
    """
    options = options or SetOptions()
    tasks = _load_set(spec, options)
    digest = set_hash(tasks)
    return [_with_origin(task, {"set": str(spec), "hash": digest}) for task in tasks]


def set_hash(tasks: Iterable[Task]) -> str:
    """SHA-256 of the ids and hashes of all tasks of a set, in hexadecimal. Their order does not matter."""
    lines = sorted(f"{task.id}\0{task.hash}\n" for task in tasks)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def is_task_set(spec: str, options: SetOptions | None = None) -> bool:
    """Whether `spec` looks like a task set. Its tasks may still be missing."""
    path = Path(spec).expanduser()
    if spec == SHIPPED or spec in shipped_tasks.shipped() or spec.startswith((GIT, SWEBENCH)):
        return True
    if path.suffix in SUFFIXES or path.name == MANIFEST or path.is_dir():
        return True
    return False if path.exists() else _dataset_source(spec, options) is not None


def _load_set(spec: str | Path, options: SetOptions) -> list[Task]:
    shipped = shipped_tasks.shipped()
    source = None
    if isinstance(spec, str):
        if spec == SHIPPED:
            return [read_task_folder(folder) for folder in shipped.values()]
        if spec in shipped:
            return [read_task_folder(shipped[spec])]
        source = parse_source(spec)
    if isinstance(source, GitSource):
        return _load_places([resolve_git(source, options)])
    if isinstance(source, SwebenchSource):
        from paddock.tasks.swebench.rows import read_rows

        return read_rows(source.file)
    path = Path(spec).expanduser()
    if path.name == MANIFEST and path.is_file():
        return _load_places(resolve_manifest(path, options))
    if path.exists():
        return list(_local_set(path))
    if isinstance(spec, str) and (dataset := _dataset_source(spec, options)) is not None:
        return _load_places(resolve_dataset(dataset, options))
    raise _unknown_set(spec, path, shipped)


def _local_set(path: Path) -> TaskSet:
    if path.is_dir():
        return TaskSet.from_folder(path)
    if path.suffix == ".jsonl":
        return TaskSet.from_jsonl(path)
    if path.suffix == ".json":
        return TaskSet.from_json(path)
    raise TaskError(f"{path} is not a task", hint="name a task folder, or a .jsonl or .json file")


def _load_places(places: Sequence[ResolvedPlace]) -> list[Task]:
    tasks = []
    for place in places:
        for task in _local_set(place.path):
            missing = [] if place.checkout is None else place.checkout.missing_in(Path(task.source))
            absent = {MISSING_FILES: [f"{path} is a git submodule" for path in missing]} if missing else {}
            tasks.append(_with_origin(task, place.origin, absent))
    return list(TaskSet(tasks))


def _with_origin(task: Task, origin: dict[str, str], metadata: dict[str, Any] | None = None) -> Task:
    """What is written first stays: the place of a fetched task is more than the words that named its set."""
    merged = {**origin, **task.metadata.get(TASK_SET, {})}
    return replace(task, metadata={**task.metadata, **(metadata or {}), TASK_SET: merged})


def _dataset_source(spec: str, options: SetOptions | None) -> DatasetSource | None:
    """A name with a version is always a dataset. Without one, only if there is a place to look it up."""
    source = parse_dataset_name(spec)
    if source is None or source.version or knows_datasets(source, options or SetOptions()):
        return source
    return None


def _unknown_set(spec: str | Path, path: Path, shipped: dict[str, Path]) -> TaskError:
    candidates = [SHIPPED, *shipped]
    if path.parent.is_dir():
        candidates += [str(path.with_name(entry.name)) for entry in path.parent.iterdir()]
    hint = _nearest(str(spec), candidates, list(shipped))
    if isinstance(spec, str) and is_package_name(spec) and not path.parent.is_dir():
        hint = "for a package of Harbor set PADDOCK_PACKAGE_STORE and PADDOCK_PACKAGE_STORE_KEY: see docs/tasks.md"
    return TaskError(f"there is no task {str(spec)!r}", hint=hint)


def _matcher(pattern: str) -> Callable[[str], object]:
    if len(pattern) > 1 and pattern.startswith("/") and pattern.endswith("/"):
        try:
            return re.compile(pattern[1:-1]).search
        except re.error as error:
            raise TaskError(f"{pattern} is not a regular expression: {error}", hint="correct it there") from error
    return re.compile(fnmatch.translate(pattern)).match


def _parse_shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise TaskError(f"the shard is {text!r}", hint="give K/N with K from 1 to N, such as 1/4")
    return int(match[1]), int(match[2])


def _nearest(name: str, candidates: list[str], examples: list[str] | None = None) -> str:
    close = difflib.get_close_matches(name, candidates, 3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    examples_shown = (candidates if examples is None else examples)[:10]
    return f"{'known' if examples is None else 'shipped'}: {', '.join(examples_shown)}"


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
