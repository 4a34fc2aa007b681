"""`paddock check TARGET|URL`."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections import Counter
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from paddock import adapters
from paddock.cli import note, print_json, refuse_unused
from paddock.cli.interrupts import run_async
from paddock.cli.task_selection import SELECTION_OPTIONS, read_tasks, select_tasks, selection_options, set_options
from paddock.config import PADDOCK_AUTH_TOKEN
from paddock.errors import ConfigError, ConnectFailed, PaddockError, TargetError
from paddock.targets import FORMS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paddock.tasks.task import Task
    from paddock.testing.checks import Announce, CheckOutcome, Result

FAILED = 1
URL = ("http://", "https://")
MARKS: dict[CheckOutcome, tuple[str, str]] = {
    "passed": ("✓", "green"),
    "failed": ("✗", "red"),
    "warning": ("!", "yellow"),
    "info": ("i", "cyan"),
    "skipped": ("–", "bright_black"),
}
NOUNS = {"warning": ("warning", "warnings"), "info": ("note", "notes")}
PIPE_WIDTH = 120


EPILOG = f"TARGET: {FORMS}, http://host:port, or a task set (see paddock tasks)"


@click.command("check", epilog=EPILOG)
@click.argument("target")
@click.option("--timeout", default=30.0, show_default=True, help="Seconds that one answer may take.")
@click.option("--auth-token", help="Token of the server at the URL. Better: PADDOCK_AUTH_TOKEN.")
@selection_options
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    target: str,
    timeout: float,
    auth_token: str | None,
    pattern: str | None,
    shard: str | None,
    limit: int | None,
    registry: str | None,
    as_json: bool,
) -> int:
    """Test an environment, a server at a URL, or tasks.

    For a task it checks that the solution scores 1.0 and that doing nothing scores less. It warns about tests that
    run the agent's program without paddock-run.

    The exit code is 0 if nothing failed, 1 if something did, and 2 if there is nothing to check at TARGET.
    """
    from paddock.tasks.taskset import is_task_set

    if not 0 < timeout < math.inf:
        raise ConfigError(f"--timeout is {timeout:g}", hint="give seconds above 0")
    if not target.startswith(URL):
        refuse_unused("auth_token", why=f"{target} is no URL of a server", hint="leave it out")
    options = set_options(registry)
    is_task = is_task_set(target, options)
    if not is_task:
        refuse_unused(*SELECTION_OPTIONS, why=f"{target} is no task set", hint="leave it out")
    select = partial(select_tasks, pattern=pattern, shard=shard, limit=limit)
    tasks = select(read_tasks(target, options)) if is_task else None
    # The logs and prints of an environment would hide the table and break the JSON.
    with hidden_logs(), redirect_stdout(sys.stderr), progress(target) as announce:
        work = examine(target, timeout, auth_token, announce) if tasks is None else examine_tasks(tasks, announce)
        results = run_async(work)
    counts = Counter(result.outcome for result in results)
    ok = not counts["failed"]
    if as_json:
        print_json({"target": target, "ok": ok, "counts": counts, "results": [asdict(r) for r in results]})
    else:
        print_table(results)
        note(summary(target, counts))
    return 0 if ok else FAILED


@contextmanager
def hidden_logs() -> Iterator[None]:
    logger = logging.getLogger("paddock")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


async def examine(target: str, timeout: float, token: str | None, announce: Announce) -> list[Result]:
    """The results for a URL or a class. Raises TargetError if there is nothing to examine."""
    from paddock.testing.conformance import check_environment, check_server

    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", target):
        raise TargetError(f"{target!r} names no environment", hint=f"did you mean http://{target}?")
    if "://" not in target or adapters.is_target(target):
        return await check_environment(load(target), timeout=timeout, announce=announce)
    if not target.startswith(URL):
        raise TargetError(f"{target!r} cannot be checked", hint="give the server as http://host:port")
    try:
        bearer = token or PADDOCK_AUTH_TOKEN.read()
        return await check_server(target, token=bearer, timeout=timeout, announce=announce)
    except ConnectFailed as error:
        refused = error.data.get("status") == 401
        hint = "give the server's token: --auth-token or PADDOCK_AUTH_TOKEN" if refused else error.hint
        raise TargetError(error.message, hint=hint) from error


async def examine_tasks(tasks: list[Task], announce: Announce) -> list[Result]:
    from paddock.testing.task import TaskCheck

    results: list[Result] = []
    for number, task in enumerate(tasks):
        announce(task.id, number, len(tasks))
        results += [replace(result, name=f"{task.id}: {result.name}") for result in await TaskCheck(task).run()]
    return results


def load(target: str) -> Any:
    """The class or factory that the target names. Raises TargetError for any exception in its module."""
    from paddock.targets import load_target

    try:
        return load_target(target)[0]
    except PaddockError:
        raise
    except Exception as error:
        message = f"{target!r} cannot be loaded: {type(error).__name__}: {error}"
        raise TargetError(message, hint="its module must import without an error") from error


@contextmanager
def progress(target: str) -> Iterator[Announce]:
    """A bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    heading, name = TextColumn("checking {task.fields[target]}"), TextColumn("{task.description}")
    columns = (heading, BarColumn(), MofNCompleteColumn(), name)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, target=target)

        def announce(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)

        yield announce


def print_table(results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(ratio=2, min_width=24)
    table.add_column(ratio=3, overflow="fold")
    for result in results:
        mark, colour = MARKS[result.outcome]
        detail = Text(result.detail, style="" if result.outcome in ("failed", "warning") else "dim")
        if result.hint:
            detail.append("\n" if result.detail else "").append("hint: ", style="cyan").append(result.hint)
        table.add_row(Text(mark, style=colour), Text(result.name), detail)
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)


def summary(target: str, counts: Counter[CheckOutcome]) -> str:
    parts = [f"{count} {NOUNS.get(kind, (kind, kind))[count > 1]}" for kind in MARKS if (count := counts[kind])]
    return f"{target}: {', '.join(parts)}"
