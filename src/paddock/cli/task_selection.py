"""The options that find a task set and choose a part of it, the same for each command that takes one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import click

from paddock.cli import note
from paddock.cli.interrupts import interruptible
from paddock.errors import TaskError
from paddock.tasks.datasets.resolve import SetOptions
from paddock.tasks.datasets.source import SWEBENCH
from paddock.tasks.taskset import TaskSet, load_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paddock.tasks.task import Task

CommandT = TypeVar("CommandT", bound="Callable[..., Any]")
SELECTION_OPTIONS = ("pattern", "shard", "limit", "registry")


def selection_options(command: CommandT) -> CommandT:
    """Add --registry, --filter, --shard and --limit. The command gets `registry`, `pattern`, `shard` and `limit`."""
    for option in (
        click.option(
            "--registry",
            metavar="FILE|URL",
            help="Harbor registry in which NAME@VERSION is looked up; also git+URL. Variable: PADDOCK_TASK_REGISTRY.",
        ),
        click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N of the tasks."),
        click.option("--shard", metavar="K/N", help="Only part K of N equal parts of the tasks, such as 1/4."),
        click.option(
            "--filter",
            "pattern",
            metavar="GLOB|/REGEX/",
            help="Only tasks whose id matches, before --shard and --limit.",
        ),
    ):
        command = option(command)
    return command


def set_options(registry: str | None, *, refresh: bool = False) -> SetOptions:
    """How a command looks up a set: what is fetched is reported on stderr."""
    return SetOptions(registry=registry, refresh=refresh, log=note)


def read_tasks(set_name: str, options: SetOptions | None = None) -> list[Task]:
    """The tasks of a set. Ctrl-C removes what was fetched of it in part. Raises TaskError."""
    # Rows are in a file here: nothing is fetched, and what reads them is imported then.
    with nullcontext() if set_name.startswith(SWEBENCH) else interruptible():
        return load_tasks(set_name, options)


def select_tasks(tasks: Sequence[Task], *, pattern: str | None, shard: str | None, limit: int | None) -> list[Task]:
    """The tasks that the options leave. Raises TaskError when none is left."""
    if pattern is None and shard is None and limit is None:
        return list(tasks)
    selected = list(TaskSet(tasks).select(pattern=pattern, shard=shard, limit=limit))
    if tasks and not selected:
        ids = ", ".join(task.id for task in tasks[:5])
        raise TaskError(f"the options leave none of the {len(tasks)} tasks", hint=f"the ids begin with: {ids}")
    return selected
