"""Task sets from elsewhere as folders and files on this machine, with the place that each came from."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.errors import TaskError
from paddock.tasks.datasets.cache import DatasetCache, default_cache
from paddock.tasks.datasets.git import check_out, resolve_commit
from paddock.tasks.datasets.packages.fetch import fetch_tasks, find_version
from paddock.tasks.datasets.packages.manifest import read_manifest
from paddock.tasks.datasets.packages.store import NEWEST, configured_store, is_package_name, is_store_configured
from paddock.tasks.datasets.registry import choose_registry, find_dataset, has_registry, local_folder
from paddock.tasks.datasets.source import DatasetSource, GitSource
from paddock.tasks.task_folder import is_task_folder, task_folder_id

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
    """A file, a folder with registry.json, a URL, or git+URL. None: PADDOCK_TASK_REGISTRY."""
    refresh: bool = False
    """Ask again what a branch, a tag or the registry has now."""
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


def knows_datasets(source: DatasetSource, options: SetOptions) -> bool:
    """Whether there is a package store or a registry that can have this name."""
    return _is_in_store(source, options) or has_registry(options.registry)


def resolve_dataset(source: DatasetSource, options: SetOptions) -> list[ResolvedPlace]:
    """The tasks of a dataset of the package store or the registry, in its order. Raises TaskError."""
    return _resolve_package(source, options) if _is_in_store(source, options) else _resolve_listed(source, options)


def resolve_manifest(file: Path, options: SetOptions) -> list[ResolvedPlace]:
    """The tasks that a dataset.toml lists: the folders beside it, and others from the store. Raises TaskError."""
    manifest = read_manifest(file)
    folders = _folders_by_task(file.parent)
    missing = [task for task in manifest.tasks if task.name not in folders]
    fetched = fetch_tasks(options.cache, configured_store(), missing, options.log) if missing else []
    packages = dict(zip(missing, fetched, strict=True))
    origin = {"set": manifest.dataset.name}
    return [
        ResolvedPlace(packages[task], {**origin, "package": str(task)})
        if task in packages
        else ResolvedPlace(folders[task.name], origin)
        for task in manifest.tasks
    ]


def _folders_by_task(folder: Path) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for child in filter(is_task_folder, sorted(folder.iterdir())):
        try:
            name = task_folder_id(child)
        except TaskError:
            # Its name is not known, so the manifest cannot mean it.
            continue
        if name in folders:
            raise TaskError(f"{folders[name]} and {child} are both {name!r}", hint="give each task its own name")
        folders[name] = child
    return folders


def _is_in_store(source: DatasetSource, options: SetOptions) -> bool:
    """ORG/NAME is a package where a store is set and the user names no other registry."""
    return options.registry is None and is_store_configured() and is_package_name(source.name)


def _resolve_package(source: DatasetSource, options: SetOptions) -> list[ResolvedPlace]:
    store = configured_store()
    version = find_version(options.cache, store, source.name, source.version or NEWEST, refresh=options.refresh)
    folders = fetch_tasks(options.cache, store, version.tasks, options.log)
    origin = {"set": str(source), "digest": version.digest}
    return [
        ResolvedPlace(folder, {**origin, "package": str(task)})
        for task, folder in zip(version.tasks, folders, strict=True)
    ]


def _resolve_listed(source: DatasetSource, options: SetOptions) -> list[ResolvedPlace]:
    """Each repository is fetched once."""
    location = choose_registry(options.registry)
    dataset = find_dataset(options.cache, location, source, options.log, refresh=options.refresh)
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
