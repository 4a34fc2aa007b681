"""`paddock trace export`: rollouts in the form that a trainer reads, or what would be wrong with them."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddock.cli import note, plural, print_json
from paddock.cli.interrupts import interruptible
from paddock.cli.store_options import rollout_filters, store_option
from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paddock.export.policy import Policy
    from paddock.export.stream import ExportFinding, ExportReport
    from paddock.store import Store

MAX_PRINTED_FINDINGS = 200
"""`--json` prints all."""
PROGRESS_BAR_ROLLOUTS = 500
"""Fewer rollouts are exported before a progress bar would be read."""


class ExportCommand(click.Command):
    """Lists the forms in its help text; they are imported only for that."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from paddock.export import FORMS, load_form

        summaries = [(name, load_form(name).summary) for name in FORMS]
        with formatter.section("Forms"):
            formatter.write_dl([*summaries, ("html", "one rollout as a page that opens without a server")])


@click.command("export", cls=ExportCommand)
@click.argument("rollout_ids", nargs=-1, metavar="[ID…]")
@store_option()
@click.option("--to", "form", default="jsonl", show_default=True, metavar="FORM", help="The form; see below.")
@click.option("--check", "only_check", is_flag=True, help="Write nothing; list what would be left out or is wrong.")
@click.option(
    "--tree", "as_trees", is_flag=True, help="One line for each tree of forks. Shared calls are written once."
)
@click.option(
    "-o", "--out", "--output", "out", type=click.Path(path_type=Path), help="File to write, or the folder for it."
)
@click.option(
    "--unscored",
    type=click.Choice(["exclude", "flag"]),
    default="exclude",
    show_default=True,
    help="Leave out rollouts without a reward, or export them with reward null.",
)
@click.option(
    "--weights",
    default="any",
    show_default=True,
    metavar="any|newest|same|N",
    help="Weight versions whose calls are trained on.",
)
@click.option("--newest", metavar="VERSION", help="The weight version that counts as the newest.")
@click.option(
    "--roles", default="agent,subagent,compaction", show_default=True, help="Roles of the calls to train on."
)
@rollout_filters
@click.option("--json", "as_json", is_flag=True, help="With --check: print the findings as JSON.")
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
    as_trees: bool,
    **filters: Any,
) -> int:
    """Write rollouts in the form that a trainer reads. Without ID, all finished ones."""
    if form == "html":
        from paddock.cli.view import write_page

        if only_check:
            raise ConfigError("a page is not for trainers: there is nothing to check", hint="leave --check out")
        if as_trees:
            raise ConfigError("a page has one rollout", hint="leave --tree out; its page shows the tree")
        return write_page(store, rollout_ids, out)
    from paddock.cli.trace import open_store
    from paddock.export import FORMS, load_form
    from paddock.export.stream import select_keys
    from paddock.store.search import Search

    if form not in FORMS:
        raise ConfigError(f"there is no form {form!r}", hint=f"use {', '.join([*FORMS, 'html'])}")
    loaded = load_form(form)
    policy = read_policy(unscored, weights, newest, roles)
    if loaded.open_writer is not None and out is None and not only_check:
        raise ConfigError(f"{form} is written to a file", hint=f"give --out FILE.{loaded.suffix}")
    with open_store(store) as opened:
        keys = select_keys(opened, rollout_ids, Search.of(finished=True, **filters))
        with progress_bar(len(keys)) as advance:
            if only_check:
                return run_check(opened, form, keys, policy, advance, as_json, as_trees)
            target = out / f"rollouts.{loaded.suffix}" if out is not None and out.is_dir() else out
            return run_export(opened, form, keys, policy, advance, target, as_trees)


def read_policy(unscored: Any, weights: str, newest: str | None, roles: str) -> Policy:
    from paddock.capture.trace import Role
    from paddock.export.policy import Policy

    try:
        trained_roles = frozenset(Role(name.strip()) for name in roles.split(","))
    except ValueError as error:
        raise ConfigError(f"--roles: {error}", hint=f"use {', '.join(role for role in Role)}") from None
    if newest is not None and weights in ("any", "same"):
        raise ConfigError(
            f"--newest has no effect with --weights {weights}", hint="add --weights newest, or --weights N"
        )
    allowed: Any = int(weights) if weights.lstrip("-").isdigit() else weights
    return Policy(unscored=unscored, roles=trained_roles, weights=allowed, newest=newest)


def run_export(
    store: Store,
    form: str,
    keys: list[int],
    policy: Policy,
    advance: Callable[[], None],
    target: Path | None,
    as_trees: bool,
) -> int:
    from paddock.export import stream

    try:
        with interruptible():
            write = stream.export_trees if as_trees else stream.export
            report = write(store, form, target or sys.stdout.buffer, keys=keys, policy=policy, progress=advance)
    except OSError as error:
        if target is None:
            raise
        raise ConfigError(f"{target} cannot be written: {error.strerror}", hint="give --out another place") from error
    print_report(report, form, "written" + (f" to {target}" if target else ""))
    return 0


def run_check(
    store: Store,
    form: str,
    keys: list[int],
    policy: Policy,
    advance: Callable[[], None],
    as_json: bool,
    as_trees: bool,
) -> int:
    """Exit code 0 if all that would be written is right, and there is something to write."""
    from dataclasses import asdict

    from paddock.export import stream

    findings = 0

    def print_finding(finding: ExportFinding) -> None:
        nonlocal findings
        findings += 1
        if as_json:
            print_json(asdict(finding))
        elif findings <= MAX_PRINTED_FINDINGS:
            click.echo(f"{finding.rollout_id}  {finding.kind}: {finding.text}")

    check = stream.check_trees if as_trees else stream.check
    report = check(store, form, keys=keys, policy=policy, on_finding=print_finding, progress=advance)
    if findings > MAX_PRINTED_FINDINGS and not as_json:
        note(f"{findings - MAX_PRINTED_FINDINGS} more; --json prints all")
    if as_json:
        print_json({**asdict(report), "form": form})
    print_report(report, form, "would be written")
    return 0 if report.documents and not report.wrong else 1


def print_report(report: ExportReport, form: str, verb: str) -> None:
    from paddock.export import load_form

    lines = plural(report.documents, f"{form} {'line' if load_form(form).open_writer is None else 'row'}")
    parts = [f"{lines} of {plural(report.rollouts, 'rollout')} {verb}"]
    if report.accepted:
        parts.append(f"{report.accepted} taken by the trainer's own package")
    if report.wrong:
        parts.append(f"{plural(report.wrong, 'thing')} wrong")
    note("; ".join(parts))
    if report.foreign:
        note(f"  {plural(report.foreign, 'call')} left out: made by another process than the agent's program")
    for reason, count in sorted(report.left_out.items(), key=lambda each: -each[1])[:10]:
        note(f"  {count} left out: {reason}")


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal, for exports that take a while."""
    if total < PROGRESS_BAR_ROLLOUTS or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("rollouts", total=total)
        yield lambda: progress.advance(task)
