"""Harbor's registry: a JSON list of datasets, each a list of tasks in git repositories or in folders beside the file.

It is a file, a file at a URL, or a file in a git repository.

[{"name": "set", "version": "1.0", "description": "…",
  "tasks": [{"name": "one", "git_url": "https://…", "git_commit_id": "…", "path": "tasks/one"}]}]
"""

from __future__ import annotations

import difflib
import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from paddock.config import PADDOCK_TASK_REGISTRY
from paddock.errors import TaskError
from paddock.limits import MEBIBYTE
from paddock.tasks.datasets.cache import DatasetCache, cache_key
from paddock.tasks.datasets.git import check_out, resolve_commit
from paddock.tasks.datasets.source import GIT, DatasetSource, parse_git, without_credentials
from paddock.tasks.json_values import ignore_unknown, read_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REGISTRY_FILE = "registry.json"
URL_SCHEMES = ("https://", "http://")
NEWEST = "head"
"""A version of this name is the newest, as in Harbor."""
HEAD = "HEAD"
LARGEST_REGISTRY = 256 * MEBIBYTE
REQUEST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class RegistryTask:
    """Where one task of a dataset is."""

    name: str
    path: str
    git_url: str = ""
    """Empty: `path` is a folder beside the registry file."""
    git_commit_id: str = ""

    @property
    def revision(self) -> str:
        return "" if self.git_commit_id == HEAD else self.git_commit_id


@dataclass(frozen=True, slots=True)
class RegistryDataset:
    name: str
    version: str
    tasks: tuple[RegistryTask, ...] = ()


def has_registry(option: str | None) -> bool:
    return _location(option) is not None


def choose_registry(option: str | None) -> str:
    """The registry that was named, or that of the variable. Raises TaskError."""
    location = _location(option)
    if location is None:
        raise TaskError(
            "no registry is named",
            hint="give --registry, or set PADDOCK_TASK_REGISTRY; "
            "for ORG/NAME of Harbor's package store set PADDOCK_PACKAGE_STORE",
        )
    return location


def _location(option: str | None) -> str | None:
    return option or PADDOCK_TASK_REGISTRY.read()


def find_dataset(
    cache: DatasetCache, location: str, source: DatasetSource, log: Callable[[str], None], *, refresh: bool
) -> RegistryDataset:
    """The dataset with this name and version. Raises TaskError."""
    if not location.startswith(GIT):
        return _choose_version(_read_rows(cache, location, refresh=refresh), location, source)
    place = parse_git(location)
    if not place.path.endswith(".json"):
        place = replace(place, path=str(PurePosixPath(place.path, REGISTRY_FILE)))
    commit = resolve_commit(cache, place, refresh=refresh)
    file = check_out(cache, place.url, commit, [place.path], log).path(place.path)
    dataset = _choose_version(_read_rows(cache, str(file), refresh=refresh), location, source)
    folder = PurePosixPath(place.path).parent
    tasks = (_in_repository(task, place.url, commit, folder) for task in dataset.tasks)
    return replace(dataset, tasks=tuple(tasks))


def _in_repository(task: RegistryTask, url: str, commit: str, folder: PurePosixPath) -> RegistryTask:
    """A folder beside a registry file in a repository is a folder of that repository."""
    if task.git_url:
        return task
    return replace(task, git_url=url, git_commit_id=commit, path=str(folder / task.path))


def _choose_version(rows: list[dict[str, Any]], location: str, source: DatasetSource) -> RegistryDataset:
    versions = [row for row in rows if row.get("name") == source.name]
    public_address = without_credentials(location)
    if not versions:
        names = sorted({str(row.get("name")) for row in rows})
        raise TaskError(f"{public_address} has no dataset {source.name!r}", hint=_nearest(source.name, names))
    chosen = source.version or _newest([str(row.get("version", "")) for row in versions])
    for row in versions:
        if str(row.get("version", "")) == chosen:
            return _read_dataset(row, f"{public_address}: {source.name}@{chosen}")
    listed = [str(row.get("version")) for row in versions]
    raise TaskError(f"{public_address} has no version {chosen!r} of {source.name}", hint=_nearest(chosen, listed))


def local_folder(location: str, task: RegistryTask) -> Path:
    """The folder of a task that is in no repository. Raises TaskError."""
    if location.startswith(URL_SCHEMES):
        raise TaskError(
            f"the registry gives no repository for the task {task.name}",
            hint="add git_url, or use the registry's file",
        )
    return _registry_file(location).parent / task.path


def _registry_file(location: str) -> Path:
    path = Path(location).expanduser()
    return path / REGISTRY_FILE if path.is_dir() else path


def _read_rows(cache: DatasetCache, location: str, *, refresh: bool) -> list[dict[str, Any]]:
    if location.startswith(URL_SCHEMES):
        key = f"registries/{cache_key(location)}.json"
        rows = cache.value(key, partial(_download, location), refresh=refresh)
    else:
        rows = _read_file(_registry_file(location))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        public_address = without_credentials(location)
        raise TaskError(
            f"{public_address} is not a registry", hint="a registry is a JSON list of objects with name and tasks"
        )
    return rows


def _download(url: str) -> Any:
    public_address = without_credentials(url)
    try:
        with urllib.request.urlopen(url, timeout=REQUEST_SECONDS) as response:
            data = response.read(LARGEST_REGISTRY)
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise TaskError(f"the registry {public_address} cannot be read: {error}", hint="check the address") from error
    return _parse(data, public_address)


def _read_file(file: Path) -> Any:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise TaskError(
            f"the registry {file} cannot be read: {error.strerror}",
            hint="give --registry a JSON file, a folder with registry.json, a URL or git+URL",
        ) from error
    return _parse(data, str(file))


def _parse(data: bytes, public_address: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"the registry {public_address} is not valid JSON: {error}", hint="correct the file"
        ) from error


def _read_dataset(row: dict[str, Any], place: str) -> RegistryDataset:
    # Null stands for a missing value, and keys such as `metrics` are not needed here.
    tasks = [{key: value for key, value in task.items() if value is not None} for task in _task_rows(row, place)]
    values = {"name": row["name"], "version": str(row.get("version", "")), "tasks": tasks}
    dataset = read_value(RegistryDataset, values, place, ignore_unknown)
    if not dataset.tasks:
        raise TaskError(f"{place} lists no task", hint="choose another version")
    for task in dataset.tasks:
        _check_path(task, place)
    return dataset


def _task_rows(row: dict[str, Any], place: str) -> list[dict[str, Any]]:
    tasks = row.get("tasks", [])
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise TaskError(f"{place}: tasks is not a list of objects", hint="correct the registry")
    return tasks


def _check_path(task: RegistryTask, place: str) -> None:
    path = PurePosixPath(task.path)
    if path.is_absolute() or ".." in path.parts or ".git" in path.parts:
        raise TaskError(f"{place}: the path of {task.name} is {task.path!r}", hint="use a plain relative path")
    if task.git_url.startswith("-") or "::" in task.git_url:
        raise TaskError(f"{place}: the git_url of {task.name} is {task.git_url!r}", hint="use https or ssh")


def _newest(versions: Sequence[str]) -> str:
    return NEWEST if NEWEST in versions else max(versions, key=_version_order)


def _version_order(version: str) -> tuple[bool, list[tuple[bool, int, str]]]:
    """Numbers in order of their value, and a version that begins with one after all others."""
    parts = re.findall(r"\d+|[a-zA-Z]+", version)
    # `1.0` is newer than `1.0rc1`: an end is worth more than a word, and less than a number.
    ordered = [(part.isdigit(), int(part) if part.isdigit() else -1, part) for part in parts]
    return re.match(r"v?\d", version) is not None, [*ordered, (False, 0, "")]


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, 3)
    return f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(names[:10])}"
