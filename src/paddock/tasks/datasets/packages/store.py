"""Harbor's package store: published datasets and tasks, each version with the hash of its content.

Knows the tables of the store. Knows neither archives nor the cache.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from paddock.config import HARBOR_API_KEY, PADDOCK_PACKAGE_STORE, PADDOCK_PACKAGE_STORE_KEY
from paddock.errors import TaskError
from paddock.tasks.datasets.packages.connection import StoreConnection
from paddock.tasks.json_values import read_value

if TYPE_CHECKING:
    from pathlib import Path

RowT = TypeVar("RowT")

NEWEST = "latest"
"""The tag that Harbor moves to each new version."""
PACKAGE_NAME = re.compile(r"(\w[\w.-]*)/(\w[\w.-]*)", re.ASCII)
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
BUCKET = "packages"
"""Where the store keeps its archives."""
WITH_PACKAGE = "package:package_id!inner(*,org:org_id!inner(name))"
TASK_COLUMNS = "task_version_id,task_version:task_version_id(content_hash,package:package_id(name,org:org_id(name)))"


@dataclass(frozen=True, slots=True)
class TaskPackage:
    """A task at one version."""

    name: str
    """`ORGANIZATION/NAME`."""
    digest: str
    """`sha256:` and the hash of its content, which `archive` computes."""

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}"


@dataclass(frozen=True, slots=True)
class PackageVersion:
    """What a reference means: the tasks of a dataset, or one task."""

    digest: str
    tasks: tuple[TaskPackage, ...] = ()


# The columns that are read, as the store names them.


@dataclass(frozen=True, slots=True)
class _Organization:
    name: str


@dataclass(frozen=True, slots=True)
class _Package:
    name: str
    org: _Organization


@dataclass(frozen=True, slots=True)
class _PackageRow:
    type: str


@dataclass(frozen=True, slots=True)
class _DatasetVersion:
    id: str
    content_hash: str


@dataclass(frozen=True, slots=True)
class _TagRow:
    dataset_version: _DatasetVersion


@dataclass(frozen=True, slots=True)
class _DatasetTask:
    content_hash: str
    package: _Package


@dataclass(frozen=True, slots=True)
class _DatasetTaskRow:
    task_version: _DatasetTask


@dataclass(frozen=True, slots=True)
class _TaskVersion:
    archive_path: str
    content_hash: str


def is_package_name(name: str) -> bool:
    return PACKAGE_NAME.fullmatch(name) is not None


def is_store_configured() -> bool:
    return PADDOCK_PACKAGE_STORE.read() is not None


def configured_store() -> PackageStore:
    """The store that the variables name. Raises TaskError."""
    url, key = PADDOCK_PACKAGE_STORE.read(), PADDOCK_PACKAGE_STORE_KEY.read()
    if url is None:
        raise TaskError("no package store is named", hint="set PADDOCK_PACKAGE_STORE and PADDOCK_PACKAGE_STORE_KEY")
    if not url.startswith(("https://", "http://")):
        raise TaskError("PADDOCK_PACKAGE_STORE is no address", hint="give one that begins with https://")
    if key is None:
        raise TaskError("PADDOCK_PACKAGE_STORE_KEY is not set", hint="set it to the public key of the store")
    return PackageStore(StoreConnection(url, key, HARBOR_API_KEY.read()))


@dataclass(frozen=True, slots=True)
class PackageStore:
    """Reads one store. Its methods can be called by several threads, and raise TaskError."""

    connection: StoreConnection

    @property
    def url(self) -> str:
        return self.connection.url

    def resolve(self, name: str, reference: str) -> PackageVersion:
        """The version of a package that has this tag, revision number or digest now."""
        if reference.startswith("sha256:") and not DIGEST.fullmatch(reference):
            raise TaskError(f"{reference!r} is not a whole digest", hint="write sha256: and 64 hexadecimal digits")
        if self._package_type(name) == "task":
            digest = _digest(self._task_version(name, reference).content_hash)
            return PackageVersion(digest, (TaskPackage(name, digest),))
        version = self._dataset_version(name, reference)
        query = {"select": TASK_COLUMNS, "dataset_version_id": f"eq.{version.id}", "order": "task_version_id.asc"}
        rows = self.connection.all_rows("dataset_version_task", query)
        tasks = tuple(_task_package(row) for row in rows)
        if not tasks:
            raise TaskError(f"{name}@{reference} has no task", hint="choose another version")
        return PackageVersion(_digest(version.content_hash), tasks)

    def download(self, task: TaskPackage, file: Path) -> None:
        """Write the archive of a task to `file`."""
        path = self._task_version(task.name, task.digest).archive_path
        self.connection.download(f"{BUCKET}/{path}", file)

    def _package_type(self, name: str) -> str:
        organization, short_name = _split(name)
        query = {
            "select": "id,type,visibility,org:org_id!inner(name)",
            "name": f"eq.{short_name}",
            "org.name": f"eq.{organization}",
            "limit": "1",
        }
        rows = self.connection.rows("package", query)
        if not rows:
            raise TaskError(
                f"the package store has no package {name}",
                hint="check the name; a private package needs HARBOR_API_KEY",
            )
        return _read_row(_PackageRow, rows[0], "package").type

    def _dataset_version(self, name: str, reference: str) -> _DatasetVersion:
        organization, short_name = _split(name)
        package = {
            "package.name": f"eq.{short_name}",
            "package.type": "eq.dataset",
            "package.org.name": f"eq.{organization}",
            "limit": "1",
        }
        digest = DIGEST.fullmatch(reference)
        if digest or reference.isdecimal():
            table = "dataset_version"
            column = {"content_hash": f"eq.{digest[1]}"} if digest else {"revision": f"eq.{reference}"}
            rows = self.connection.rows(table, {"select": f"*,{WITH_PACKAGE}", **column, **package})
            versions = [_read_row(_DatasetVersion, row, table) for row in rows]
        else:
            table = "dataset_version_tag"
            select = f"dataset_version:dataset_version_id(*),{WITH_PACKAGE}"
            rows = self.connection.rows(table, {"select": select, "tag": f"eq.{reference}", **package})
            versions = [_read_row(_TagRow, row, table).dataset_version for row in rows]
        if not versions:
            raise _no_version(name, reference)
        return versions[0]

    def _task_version(self, name: str, reference: str) -> _TaskVersion:
        organization, short_name = _split(name)
        parameters = {"p_org": organization, "p_name": short_name, "p_ref": reference}
        version = self.connection.call("resolve_task_version", parameters)
        if not version:
            raise _no_version(name, reference)
        return _read_row(_TaskVersion, version, "resolve_task_version")


def _split(name: str) -> tuple[str, str]:
    match = PACKAGE_NAME.fullmatch(name)
    if match is None:
        raise TaskError(f"{name!r} is not the name of a package", hint="write ORGANIZATION/NAME")
    return match[1], match[2]


def _digest(content_hash: str) -> str:
    digest = f"sha256:{content_hash}"
    if not DIGEST.fullmatch(digest):
        raise TaskError(f"the package store gave {content_hash!r} as a hash", hint="check PADDOCK_PACKAGE_STORE")
    return digest


def _task_package(row: object) -> TaskPackage:
    task = _read_row(_DatasetTaskRow, row, "dataset_version_task").task_version
    name = f"{task.package.org.name}/{task.package.name}"
    _split(name)
    return TaskPackage(name, _digest(task.content_hash))


def _read_row(kind: type[RowT], row: object, table: str) -> RowT:
    return read_value(kind, row, f"{table} of the package store", _ignore_column)


def _ignore_column(where: str, key: str, keys: list[str]) -> None:
    pass


def _no_version(name: str, reference: str) -> TaskError:
    return TaskError(
        f"{name} has no version {reference!r}",
        hint=f"give a tag such as {NEWEST}, a revision number or sha256:DIGEST",
    )
