"""Task sets from elsewhere as folders and files on this machine, with the place that each came from."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.errors import TaskError
from paddock.tasks.datasets.cache import DatasetCache, default_cache
from paddock.tasks.datasets.git import check_out, resolve_commit
from paddock.tasks.datasets.registry import choose_registry, find_dataset, local_folder
from paddock.tasks.datasets.source import GitSource, RegistrySource
from paddock.tasks.task_folder import is_task_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paddock.tasks.datasets.git import Checkout
    from paddock.tasks.datasets.registry import RegistryTask

SHOWN_FOLDERS = 5


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class SetOptions:
    """How a task set is looked up."""

    registry: str | None = None
    """A file or URL. None: PADDOCK_TASK_REGISTRY."""
    refresh: bool = False
    """Ask again which commit a branch has, and read the registry again."""
    log: Callable[[str], None] = _silent
    """Called with a line before something is fetched."""
    cache: DatasetCache = field(default_factory=default_cache)


@dataclass(frozen=True, slots=True)
class ResolvedPlace:
    """Tasks on this machine: one folder, a folder of folders, or a file."""

    path: Path
    origin: dict[str, Any]
    """What the record of a rollout says about it."""
    checkout: Checkout | None = None


def resolve_git(source: GitSource, options: SetOptions) -> ResolvedPlace:
    """Raises TaskError."""
    commit = resolve_commit(options.cache, source, refresh=options.refresh)
    checkout = check_out(options.cache, source.url, commit, [source.path] if source.path else [], options.log)
    path = checkout.path(source.path)
    if path.is_dir() and not _holds_tasks(path):
        below = sorted(
            {str(place.parent.parent.relative_to(checkout.folder)) for place in path.rglob("instruction.md")}
        )
        names = " or ".join(f"#{name}" for name in below[:SHOWN_FOLDERS] if name != ".")
        raise TaskError(
            f"{source} holds no task", hint=f"name a folder of it: {names}" if names else "name another one"
        )
    return ResolvedPlace(path, {"set": str(source), "commit": commit}, checkout)


def resolve_dataset(source: RegistrySource, options: SetOptions) -> list[ResolvedPlace]:
    """The tasks in the order of the registry. Each repository is fetched once. Raises TaskError."""
    location = choose_registry(options.registry)
    dataset = find_dataset(options.cache, location, source, refresh=options.refresh)
    name = f"{dataset.name}@{dataset.version}"
    commits = {task: _commit(task, options) for task in dataset.tasks if task.git_url}
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for task, commit in commits.items():
        groups[task.git_url, commit].append(task.path.strip("/"))
    checkouts = {
        key: check_out(options.cache, *key, [] if "." in paths else paths, options.log)
        for key, paths in groups.items()
    }
    places = []
    for task in dataset.tasks:
        if task not in commits:
            places.append(ResolvedPlace(local_folder(location, task), {"set": name}))
            continue
        commit = commits[task]
        checkout = checkouts[task.git_url, commit]
        origin = {"set": name, "source": str(GitSource(task.git_url, path=task.path)), "commit": commit}
        places.append(ResolvedPlace(checkout.path(task.path), origin, checkout))
    return places


def _commit(task: RegistryTask, options: SetOptions) -> str:
    return resolve_commit(options.cache, GitSource(task.git_url, task.revision), refresh=options.refresh)


def _holds_tasks(folder: Path) -> bool:
    return is_task_folder(folder) or any(is_task_folder(child) for child in folder.iterdir() if child.is_dir())
