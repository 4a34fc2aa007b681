"""`paddock trace export`: rollouts in the form that a trainer reads, or what would be wrong with them."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddock.cli import counted, note, print_json
from paddock.cli.interrupts import interruptible
from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paddock.rollouts.export.policy import Policy
    from paddock.rollouts.export.stream import Finding, Report
    from paddock.rollouts.store import Store

MOST_TOLD = 200
"""Findings that a person gets to read; `--json` tells all."""
QUICK = 500
"""Fewer rollouts than this are done before a bar is worth drawing."""


@click.command("export")
@click.argument("rollout_ids", nargs=-1, metavar="[ID…]")
@click.option("--store", type=click.Path(path_type=Path), help="Where rollouts are kept. Also: PADDOCK_STORE.")
@click.option("--to", "form", default="jsonl", show_default=True, metavar="FORM", help="The form; see below.")
@click.option("--check", "only_check", is_flag=True, help="Write nothing; say what would be left out or is wrong.")
@click.option("-o", "--out", "--output", "out", type=click.Path(path_type=Path), help="A file, or a folder for one.")
@click.option(
    "--unscored",
    type=click.Choice(["exclude", "flag"]),
    default="exclude",
    show_default=True,
    help="Leave rollouts without a reward out, or give them one of null. It is never 0.",
)
@click.option(
    "--weights", default="any", show_default=True, metavar="any|newest|same|N", help="Whose calls to train on."
)
@click.option("--newest", metavar="VERSION", help="The weight version that counts as the newest.")
@click.option("--roles", default="agent,subagent,compaction", show_default=True, help="Calls for what to train on.")
@click.option("--task", "task_id", help="Only rollouts of this task.")
@click.option("--agent", help="Only rollouts of this agent.")
@click.option("--model", help="Only rollouts of this model.")
@click.option("--outcome", help="Only rollouts that ended so.")
@click.option("--batch", "batch_id", help="Only rollouts of this batch.")
@click.option(
    "--json", "as_json", is_flag=True, help="With --check, print findings as JSON. Exports are data already."
)
def command(
    rollout_ids: tuple[str, ...],
    store: Path | None,
    form: str,
    only_check: bool,
    out: Path | None,
    unscored: Any,
    weights: str,
    newest: str | None,
    roles: str,
    as_json: bool,
    **filters: Any,
) -> int:
    """Write rollouts in the form that a trainer reads. Without ID, all finished ones.

    \b
    jsonl      one object for each call: ids, logprobs, mask
    openenv    TrainingTrace          trl      columns of a rollout_func
    skyrl      GeneratorOutput        verl     AgentLoopOutput
    prime      TrainingSample         verifiers  Trace (v1)
    slime      Sample                 tinker   Datum
    atif       trajectories, v1.8     parquet  one row for each sample (needs --out)
    replay     everything, to be played back
    html       one rollout as a page that opens without a server
    """
    if form == "html":
        from paddock.cli.view import write_page

        if only_check:
            raise ConfigError("a page is not for trainers: there is nothing to check", hint="leave --check out")
        return write_page(store, rollout_ids, out)
    from paddock.cli.trace import opened
    from paddock.rollouts.export import FORMS, load_form
    from paddock.rollouts.export.stream import chosen
    from paddock.rollouts.store.rows import Filters

    if form not in FORMS:
        raise ConfigError(f"there is no form {form!r}", hint=f"use {', '.join([*FORMS, 'html'])}")
    load_form(form)
    policy = policy_of(unscored, weights, newest, roles)
    if form == "parquet" and out is None and not only_check:
        raise ConfigError("Parquet is written to a file", hint="give --out FILE.parquet")
    with opened(store) as kept:
        keys = chosen(kept, rollout_ids, Filters(finished=True, **filters))
        with bar(len(keys)) as advance:
            if only_check:
                return checked(kept, form, keys, policy, advance, as_json)
            return written(kept, form, keys, policy, advance, out)


def policy_of(unscored: Any, weights: str, newest: str | None, roles: str) -> Policy:
    from paddock.rollouts.export.policy import Policy
    from paddock.rollouts.trace import Role

    try:
        wanted = frozenset(Role(name.strip()) for name in roles.split(","))
    except ValueError as error:
        raise ConfigError(f"--roles: {error}", hint=f"use {', '.join(role for role in Role)}") from None
    if newest is not None and weights in ("any", "same"):
        raise ConfigError(
            f"--newest has no effect with --weights {weights}", hint="add --weights newest, or --weights N"
        )
    allowed: Any = int(weights) if weights.lstrip("-").isdigit() else weights
    return Policy(unscored=unscored, roles=wanted, weights=allowed, newest=newest)


def written(
    store: Store, form: str, keys: list[int], policy: Policy, advance: Callable[[], None], out: Path | None
) -> int:
    from paddock.rollouts.export.stream import export

    target = out / f"rollouts.{form if form == 'parquet' else 'jsonl'}" if out is not None and out.is_dir() else out
    try:
        with interruptible():
            report = export(store, form, target or sys.stdout.buffer, keys=keys, policy=policy, progress=advance)
    except OSError as error:
        if target is None:
            raise
        raise ConfigError(f"{target} cannot be written: {error.strerror}", hint="give --out another place") from error
    tell_report(report, form, "written" + (f" to {target}" if target else ""))
    return 0


def checked(
    store: Store, form: str, keys: list[int], policy: Policy, advance: Callable[[], None], as_json: bool
) -> int:
    """Exit code 0 if all that would be written is right, and there is something to write."""
    from dataclasses import asdict

    from paddock.rollouts.export.stream import check

    told = 0

    def tell(finding: Finding) -> None:
        nonlocal told
        told += 1
        if as_json:
            print_json(asdict(finding))
        elif told <= MOST_TOLD:
            click.echo(f"{finding.rollout_id}  {finding.kind}: {finding.text}")

    report = check(store, form, keys=keys, policy=policy, tell=tell, progress=advance)
    if told > MOST_TOLD and not as_json:
        note(f"{told - MOST_TOLD} more; --json tells all")
    if as_json:
        print_json({**asdict(report), "form": form})
    tell_report(report, form, "would be written")
    return 0 if report.documents and not report.wrong else 1


def tell_report(report: Report, form: str, verb: str) -> None:
    lines = counted(report.documents, f"{form} {'row' if form == 'parquet' else 'line'}")
    parts = [f"{lines} of {counted(report.rollouts, 'rollout')} {verb}"]
    if report.accepted:
        parts.append(f"{report.accepted} taken by the trainer's own package")
    if report.wrong:
        parts.append(f"{counted(report.wrong, 'thing')} wrong")
    note("; ".join(parts))
    if report.foreign:
        note(f"  {counted(report.foreign, 'call')} left out: made by another process than the agent's program")
    for reason, count in sorted(report.left_out.items(), key=lambda each: -each[1])[:10]:
        note(f"  {count} left out: {reason}")


@contextmanager
def bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, for exports that take a while."""
    if total < QUICK or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("rollouts", total=total)
        yield lambda: progress.advance(task)
