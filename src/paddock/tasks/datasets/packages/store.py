"""Harbor's package store: published datasets and tasks, each version with the hash of its content.

Knows the tables of the store. Knows neither archives nor the cache.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from paddock.config import HARBOR_API_KEY, PADDOCK_PACKAGE_STORE, PADDOCK_PACKAGE_STORE_KEY, Variable
from paddock.errors import TaskError
from paddock.tasks.datasets.packages.connection import SHOWN_CHARACTERS, StoreConnection
from paddock.tasks.json_values import ignore_unknown, read_value

if TYPE_CHECKING:
    from pathlib import Path

RowT = TypeVar("RowT")

NEWEST = "latest"
"""The tag that Harbor moves to each new version."""
PACKAGE_NAME = re.compile(r"(\w[\w.-]{0,199})/(\w[\w.-]{0,199})", re.ASCII)
STORE_ADDRESS = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[\w.-]+)(:\d{1,5})?(/[\w./-]*)?", re.ASCII)
KEY = re.compile(r"[!-~]+")
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
    tasks: tuple[TaskPackage, ...]


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
    id: str | int
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
    task_version: _DatasetTask | None
    """None: a task that the key may not read."""


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
    url = PADDOCK_PACKAGE_STORE.read()
    if url is None:
        raise TaskError("no package store is named", hint="set PADDOCK_PACKAGE_STORE and PADDOCK_PACKAGE_STORE_KEY")
    if not STORE_ADDRESS.fullmatch(url):
        raise TaskError("PADDOCK_PACKAGE_STORE is not an address", hint="write https://HOST, without a password")
    key = _read_key(PADDOCK_PACKAGE_STORE_KEY)
    if key is None:
        raise TaskError("PADDOCK_PACKAGE_STORE_KEY is not set", hint="set it to the public key of the store")
    return PackageStore(StoreConnection(url, key, _read_key(HARBOR_API_KEY)))


def _read_key(variable: Variable[str | None]) -> str | None:
    key = variable.read()
    if key is not None and not KEY.fullmatch(key.strip()):
        raise TaskError(f"{variable.name} has characters that no key has", hint="copy it again")
    return key and key.strip()


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
            raise TaskError(
                f"{reference!r} is not a whole digest", hint="write sha256: and 64 hexadecimal digits, in lower case"
            )
        is_task = self._package_type(name) == "task"
        version = self._resolve_task(name, reference) if is_task else self._resolve_dataset(name, reference)
        if DIGEST.fullmatch(reference) and version.digest != reference:
            raise TaskError(
                f"the package store gave {version.digest} for {name}@{reference}", hint="check PADDOCK_PACKAGE_STORE"
            )
        return version

    def download(self, task: TaskPackage, file: Path) -> None:
        """Write the archive of a task to `file`. Raises OSError if it cannot be written."""
        path = self._task_version(task.name, task.digest).archive_path
        self.connection.download(f"{BUCKET}/{path}", file)

    def _resolve_task(self, name: str, reference: str) -> PackageVersion:
        digest = _digest(self._task_version(name, reference).content_hash)
        return PackageVersion(digest, (TaskPackage(name, digest),))

    def _resolve_dataset(self, name: str, reference: str) -> PackageVersion:
        version = self._dataset_version(name, reference)
        query = {"select": TASK_COLUMNS, "dataset_version_id": f"eq.{version.id}", "order": "task_version_id.asc"}
        tasks = tuple(map(_task_package, self.connection.all_rows("dataset_version_task", query)))
        if not tasks:
            raise TaskError(f"{name}@{reference} has no task", hint="choose another version")
        names = [task.name for task in tasks]
        if len(set(names)) < len(names):
            raise TaskError(f"{name}@{reference} lists a task twice", hint="choose another version")
        return PackageVersion(_digest(version.content_hash), tasks)

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
        raise TaskError(f"{name[:SHOWN_CHARACTERS]!r} is not the name of a package", hint="write ORGANIZATION/NAME")
    return match[1], match[2]


def _digest(content_hash: str) -> str:
    digest = f"sha256:{content_hash}"
    if not DIGEST.fullmatch(digest):
        raise TaskError(
            f"the package store gave {content_hash[:SHOWN_CHARACTERS]!r} as a hash",
            hint="check PADDOCK_PACKAGE_STORE",
        )
    return digest


def _task_package(row: object) -> TaskPackage:
    task = _read_row(_DatasetTaskRow, row, "dataset_version_task").task_version
    if task is None:
        raise TaskError("a task of the dataset cannot be read", hint="a private task needs HARBOR_API_KEY")
    name = f"{task.package.org.name}/{task.package.name}"
    _split(name)
    return TaskPackage(name, _digest(task.content_hash))


def _read_row(kind: type[RowT], row: object, table: str) -> RowT:
    try:
        return read_value(kind, row, table, ignore_unknown)
    except TaskError as error:
        raise TaskError(
            f"the package store gave another form of {table}: {error.message[:SHOWN_CHARACTERS]!r}",
            hint="check PADDOCK_PACKAGE_STORE",
        ) from error


def _no_version(name: str, reference: str) -> TaskError:
    return TaskError(
        f"{name} has no version {reference!r}",
        hint=f"give a tag such as {NEWEST}, a revision number or sha256:DIGEST",
    )
