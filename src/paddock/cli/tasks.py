"""`paddock tasks ls|pull|check SET`: task sets."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from paddock.cli import note, plural, print_json
from paddock.cli.task_selection import read_tasks, select_tasks, selection_options, set_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paddock.tasks.task import Task
    from paddock.testing.task_set import TaskReport

FAILED = 1
PIPE_WIDTH = 160
INSTRUCTION_CHARACTERS = 50
SHORT_HASH_CHARACTERS = 12
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("tasks")
def command() -> None:
    """List, fetch and check task sets.

    \b
    SET is one of
      FOLDER                   a task folder, or a folder of them
      FILE.jsonl, FILE.json    tasks in their JSON form
      git+URL@REV#PATH         a folder or file in a git repository; @REV and #PATH may be left out
      NAME@VERSION             a dataset of a Harbor registry (--registry)
      ORG/NAME@REF             a dataset or task of Harbor's package store (PADDOCK_PACKAGE_STORE)
      dataset.toml             the tasks that a manifest of Harbor lists
      swebench:FILE            rows like those of SWE-bench, .jsonl or .parquet
      NAME, shipped            a task that comes with Paddock, or all of them
    """


@command.command("ls")
@click.argument("set_name", metavar="SET")
@selection_options
@json_option
def list_command(
    set_name: str, pattern: str | None, shard: str | None, limit: int | None, registry: str | None, as_json: bool
) -> int:
    """List the tasks of SET. With --json, one object for each task."""
    tasks = _selected(set_name, registry, pattern, shard, limit)
    if as_json:
        for task in tasks:
            print_json(describe(task))
        return 0
    print_tasks(tasks)
    note(f"{plural(len(tasks), 'task')}; {origin_line(tasks)}")
    return 0


@command.command("pull")
@click.argument("set_name", metavar="SET")
@selection_options
@click.option("--no-images", is_flag=True, help="Fetch only the tasks.")
@json_option
def pull_command(
    set_name: str,
    pattern: str | None,
    shard: str | None,
    limit: int | None,
    registry: str | None,
    no_images: bool,
    as_json: bool,
) -> int:
    """Fetch SET, and the images that its tasks name or build upon.

    A branch, a tag or a registry is asked for its newest state. Afterwards other commands need no network for SET.
    Pulls that were interrupted are resumed. Ends with 1 if an image cannot be pulled.
    """
    from paddock.rollouts.set_images import find_image_names

    tasks = _selected(set_name, registry, pattern, shard, limit, refresh=True)
    names = [] if no_images else find_image_names(tasks)
    problems = pull_images(names)
    if as_json:
        images = [{"name": name, "problem": problems.get(name)} for name in names]
        print_json({"set": set_name, "tasks": len(tasks), **origin(tasks), "images": images})
    note(f"{plural(len(tasks), 'task')}; {origin_line(tasks)}")
    if names:
        note(f"{len(names) - len(problems)} of {plural(len(names), 'image')} ready")
    for name, problem in problems.items():
        note(f"{name}: {problem}")
    return FAILED if problems else 0


@command.command("check")
@click.argument("set_name", metavar="SET")
@selection_options
@click.option("--parallel", type=click.IntRange(1, 1024), default=2, show_default=True, help="Tasks at a time.")
@json_option
def check_command(
    set_name: str,
    pattern: str | None,
    shard: str | None,
    limit: int | None,
    registry: str | None,
    parallel: int,
    as_json: bool,
) -> int:
    """Check each task of SET as `paddock check` does: its solution scores 1.0, and doing nothing scores less.

    Ends with 0 if no task failed, with 1 if one did, and with 2 if SET cannot be read.
    """
    from paddock.cli.check import hidden_logs, progress
    from paddock.cli.interrupts import run_async
    from paddock.testing.task_set import check_tasks

    tasks = _selected(set_name, registry, pattern, shard, limit)
    with hidden_logs(), redirect_stdout(sys.stderr), progress(set_name) as announce:
        reports = run_async(check_tasks(tasks, parallel=parallel, announce=announce))
    failed = [report for report in reports if not report.ok]
    if as_json:
        print_json(
            {
                "set": set_name,
                **origin(tasks),
                "ok": not failed,
                "counts": {"passed": len(reports) - len(failed), "failed": len(failed)},
                "faults": count_faults(failed),
                "tasks": [describe_report(report) for report in reports],
            }
        )
    else:
        print_failures(failed)
    note(summary(set_name, reports))
    return FAILED if failed else 0


def _selected(
    set_name: str,
    registry: str | None,
    pattern: str | None,
    shard: str | None,
    limit: int | None,
    *,
    refresh: bool = False,
) -> list[Task]:
    tasks = read_tasks(set_name, set_options(registry, refresh=refresh))
    return select_tasks(tasks, pattern=pattern, shard=shard, limit=limit)


# -- what is printed --------------------------------------------------------------------------------------


def describe(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "hash": task.hash,
        "image": image_name(task),
        "steps": len(task.steps),
        "network": network_name(task),
        "needs": needs(task),
        "instruction": task.instruction,
        "task_set": task.metadata.get("task_set"),
    }


def image_name(task: Task) -> str | None:
    if task.image is None:
        return None
    return task.image.name or "Dockerfile"


def network_name(task: Task) -> str:
    """What the agent may connect to."""
    return str(task.network.policy("agent", on_image=task.image is not None))


def needs(task: Task) -> list[str]:
    """What the task needs and does not get here: it is refused for that."""
    from paddock.tasks.requirements import MISSPELLED_TABLES, UNREADABLE, find_missing_files, missing_parts

    grader = task.settings.verifier.grader
    problem = [grader.problem] if grader is not None and grader.problem else []
    unreadable = ["to be readable"] if UNREADABLE in task.metadata else []
    misspelled = [f"a correction of {table}" for table in task.metadata.get(MISSPELLED_TABLES, ())]
    return [*unreadable, *misspelled, *missing_parts(task, "bwrap"), *find_missing_files(task), *problem]


def print_tasks(tasks: Sequence[Task]) -> None:
    from rich.text import Text

    table = _table("task", "image", "steps", "network", "needs", "instruction")
    for task in tasks:
        words = " ".join(task.instruction.split())
        short = f"{words[:INSTRUCTION_CHARACTERS]}…" if len(words) > INSTRUCTION_CHARACTERS else words
        steps = str(len(task.steps) or "–")
        columns = (task.id, image_name(task) or "–", steps, network_name(task), ", ".join(needs(task)) or "–", short)
        table.add_row(*map(Text, columns))
    _print(table)


def print_failures(reports: Sequence[TaskReport]) -> None:
    from rich.text import Text

    if not reports:
        return
    table = _table("task", "fault", "detail")
    for report in reports:
        for result in report.failures:
            detail = Text(result.detail)
            if result.hint:
                detail.append("\nhint: ", style="cyan").append(result.hint)
            table.add_row(Text(report.id), Text(result.fault or "–"), detail)
    _print(table)


def describe_report(report: TaskReport) -> dict[str, Any]:
    results = [asdict(result) for result in report.results]
    return {"id": report.id, "hash": report.hash, "ok": report.ok, "results": results}


def count_faults(reports: Iterable[TaskReport]) -> dict[str, int]:
    """In how many tasks each fault is, most frequent first."""
    return dict(Counter(fault for report in reports for fault in report.faults).most_common())


def summary(set_name: str, reports: Sequence[TaskReport]) -> str:
    failed = [report for report in reports if not report.ok]
    faults = ", ".join(f"{count} {name}" for name, count in count_faults(failed).items())
    counts = f"{plural(len(reports), 'task')}, {len(reports) - len(failed)} passed, {len(failed)} failed"
    return f"{set_name}: {counts}{f' ({faults})' if faults else ''}"


def origin(tasks: Sequence[Task]) -> dict[str, Any]:
    """The hash of the whole set, and the commits and published digests that its tasks are from."""
    from paddock.tasks.taskset import TASK_SET

    origins = [task.metadata[TASK_SET] for task in tasks]
    commits, digests = (sorted({each[key] for each in origins if key in each}) for key in ("commit", "digest"))
    return {"hash": origins[0]["hash"] if origins else None, "commits": commits, "digests": digests}


def origin_line(tasks: Sequence[Task]) -> str:
    values = origin(tasks)
    commits = [f"commit {commit[:SHORT_HASH_CHARACTERS]}" for commit in values["commits"]]
    digests = [digest[: len("sha256:") + SHORT_HASH_CHARACTERS] for digest in values["digests"]]
    return ", ".join([f"hash {values['hash'][:SHORT_HASH_CHARACTERS]}", *commits, *digests])


def _table(*names: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="right" if name == "steps" else "left", overflow="fold")
    return table


def _print(table: Any) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)


# -- images -----------------------------------------------------------------------------------------------


def pull_images(names: Sequence[str]) -> dict[str, str]:
    """Pull those that are not stored yet, one after the other. Returns why some could not be pulled."""
    from paddock.cli.image import ProgressLine
    from paddock.cli.interrupts import run_async
    from paddock.errors import ImageError
    from paddock.sandbox.images.registry.pull import PullProgress
    from paddock.sandbox.images.resolve import get_image

    problems: dict[str, str] = {}
    for name in names:
        try:
            with ProgressLine(name) as line:
                run_async(get_image(name, progress=PullProgress(line.show)))
        except ImageError as error:
            problems[name] = f"{error.message} (hint: {error.hint})" if error.hint else error.message
    return problems
