"""A `dataset.toml` of Harbor: the tasks of a dataset, each with the digest at which it is published."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddock.errors import TaskError
from paddock.tasks.datasets.packages.store import DIGEST, TaskPackage, is_package_name
from paddock.tasks.json_values import ignore_unknown, read_value

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "dataset.toml"


@dataclass(frozen=True, slots=True)
class ManifestDataset:
    name: str
    """`ORGANIZATION/NAME`."""


@dataclass(frozen=True, slots=True)
class Manifest:
    dataset: ManifestDataset
    tasks: tuple[TaskPackage, ...] = ()


def read_manifest(file: Path) -> Manifest:
    """Raises TaskError."""
    try:
        plain = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TaskError(f"{file} cannot be read: {error.strerror}", hint="name a readable file") from error
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{file} is not valid TOML: {error}", hint="correct the file") from error
    manifest = read_value(Manifest, plain, str(file), ignore_unknown)
    if not manifest.tasks:
        raise TaskError(f"{file} lists no task", hint="add a [[tasks]] table with name and digest for each task")
    for task in manifest.tasks:
        if not is_package_name(task.name):
            raise TaskError(f"{file}: the task {task.name!r} has no organization", hint="write ORGANIZATION/NAME")
        if not DIGEST.fullmatch(task.digest):
            raise TaskError(
                f"{file}: the digest of {task.name} is {task.digest!r}", hint="write sha256: and 64 digits"
            )
    return manifest
