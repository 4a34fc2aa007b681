"""Published tasks in the cache: each one as a folder whose content has the published hash."""

from __future__ import annotations

import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from paddock.errors import TaskError
from paddock.tasks.datasets.cache import cache_key
from paddock.tasks.datasets.packages.archive import unpack_task
from paddock.tasks.datasets.packages.store import PackageVersion, TaskPackage
from paddock.tasks.datasets.source import without_credentials
from paddock.tasks.json_values import read_value, write_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paddock.tasks.datasets.cache import DatasetCache
    from paddock.tasks.datasets.packages.store import PackageStore

T = TypeVar("T")

DOWNLOADS = 8
"""Tasks that are fetched at a time."""
ARCHIVE = "archive.tar.gz"
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
        log(f"fetching {len(missing)} of {len(tasks)} tasks from {without_credentials(store.url)}")
        step = len(missing) // PROGRESS_LINES

        def announce(done: int) -> None:
            if step and done % step == 0:
                log(f"fetched {done} of {len(missing)} tasks")

        _for_each(missing, partial(_fetch_task, cache, store), announce)
    return [_fetch_task(cache, store, task) for task in tasks]


def _fetch_task(cache: DatasetCache, store: PackageStore, task: TaskPackage) -> Path:
    def make(folder: Path) -> None:
        archive = folder / ARCHIVE
        store.download(task, archive)
        tree = folder / _short_name(task)
        tree.mkdir()
        try:
            digest = f"sha256:{unpack_task(archive, tree)}"
        except TaskError as error:
            raise TaskError(f"{task.name}: {error.message}", hint=error.hint) from error
        archive.unlink()
        if digest != task.digest:
            raise TaskError(
                f"{task.name} was published as {task.digest}, and its archive has {digest}",
                hint="do not use it: ask its publisher, or choose another version",
            )

    return cache.folder(_key(task), make) / _short_name(task)


def _key(task: TaskPackage) -> str:
    return f"packages/tasks/{cache_key(task.name, task.digest)}"


def _short_name(task: TaskPackage) -> str:
    """The folder of a task has its name, as a task without a name in its task.toml is called by its folder."""
    return task.name.partition("/")[2]


def _for_each(items: Sequence[T], work: Callable[[T], object], announce: Callable[[int], None]) -> None:
    """Call `work` for each item in threads. After an exception no more items are begun, and it is raised.

    The threads are daemons: an interrupted program does not wait for their downloads.
    """
    waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    outcomes: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                work(item)
            except Exception as error:
                stopped.set()
                outcomes.put(error)
            else:
                outcomes.put(None)

    threads = [threading.Thread(target=run, name="fetch a task", daemon=True) for _ in items[:DOWNLOADS]]
    for thread in threads:
        thread.start()
    try:
        for done in range(1, len(items) + 1):
            if (error := outcomes.get()) is not None:
                for thread in threads:
                    thread.join()
                raise error
            announce(done)
    finally:
        stopped.set()
