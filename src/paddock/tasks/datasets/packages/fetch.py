"""Published tasks in the cache: each one as a folder whose content has the published hash."""

from __future__ import annotations

import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from paddock.errors import TaskError
from paddock.retry import Deadline
from paddock.tasks.datasets.cache import cache_key
from paddock.tasks.datasets.packages.archive import unpack_task
from paddock.tasks.datasets.packages.store import PackageVersion, TaskPackage
from paddock.tasks.json_values import read_value, write_value
from paddock.tasks.task_folder import is_task_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paddock.tasks.datasets.cache import DatasetCache
    from paddock.tasks.datasets.packages.store import PackageStore

T = TypeVar("T")

DOWNLOADS = 8
"""Tasks that are fetched at a time."""
STOP_SECONDS = 2.0
"""How long a failure waits for the other downloads to remove what they have."""
ARCHIVE = ".archive.tar.gz"
"""No task has such a name."""
PROGRESS_LINES = 10


def find_version(
    cache: DatasetCache, store: PackageStore, name: str, reference: str, *, refresh: bool
) -> PackageVersion:
    """What the reference means: as it was found earlier, or with `refresh` as it is now. Raises TaskError."""
    key = f"packages/versions/{cache_key(store.url, name, reference)}.json"
    stored = cache.value(key, lambda: write_value(store.resolve(name, reference)), refresh=refresh)
    return read_value(PackageVersion, stored, f"the stored version of {name}")


def fetch_tasks(
    cache: DatasetCache, store: PackageStore, tasks: Sequence[TaskPackage], log: Callable[[str], None]
) -> list[Path]:
    """The folders of the tasks, from the cache or fetched. Raises TaskError."""
    missing = [task for task in tasks if not (cache.root / _key(task)).is_dir()]
    if missing:
        log(f"fetching {len(missing)} of {len(tasks)} tasks from {store.url}")
        step = len(missing) // PROGRESS_LINES

        def announce(done: int) -> None:
            if step and done % step == 0:
                log(f"fetched {done} of {len(missing)} tasks")

        _for_each(missing, partial(_fetch_task, cache, store), announce, store.connection.stopped)
    return [_fetch_task(cache, store, task) for task in tasks]


def _fetch_task(cache: DatasetCache, store: PackageStore, task: TaskPackage) -> Path:
    def make(folder: Path) -> None:
        try:
            _fill(folder, store, task)
        except TaskError as error:
            raise TaskError(f"{task.name}: {error.message}", hint=error.hint) from error

    return cache.folder(_key(task), make) / _short_name(task)


def _fill(folder: Path, store: PackageStore, task: TaskPackage) -> None:
    archive, tree = folder / ARCHIVE, folder / _short_name(task)
    store.download(task, archive)
    tree.mkdir()
    digest = f"sha256:{unpack_task(archive, tree)}"
    archive.unlink()
    if digest != task.digest:
        raise TaskError(
            f"it was published as {task.digest}, and its archive has {digest}",
            hint="do not use it: ask its publisher, or choose another version",
        )
    if not is_task_folder(tree):
        raise TaskError("its archive is no task", hint="ask its publisher, or choose another version")


def _key(task: TaskPackage) -> str:
    return f"packages/tasks/{cache_key(task.name, task.digest)}"


def _short_name(task: TaskPackage) -> str:
    """The folder of a task has its name, as a task without a name in its task.toml is called by its folder."""
    return task.name.partition("/")[2]


def _for_each(
    items: Sequence[T], work: Callable[[T], object], announce: Callable[[int], None], stopped: threading.Event
) -> None:
    """Call `work` for each item in threads. The first exception is raised, and `stopped` ends what still works.

    The threads are daemons: an interrupted program does not wait for one that hangs.
    """
    waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    outcomes: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run() -> None:
        while not stopped.is_set():
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                work(item)
            except Exception as error:
                outcomes.put(error)
            else:
                outcomes.put(None)

    threads = [threading.Thread(target=run, name="fetch a task", daemon=True) for _ in items[:DOWNLOADS]]
    for thread in threads:
        thread.start()
    try:
        for done in range(1, len(items) + 1):
            if (error := outcomes.get()) is not None:
                raise error
            announce(done)
    except BaseException:
        stopped.set()
        deadline = Deadline(STOP_SECONDS)
        for thread in threads:
            thread.join(max(deadline.seconds_left, 0.0))
        raise
