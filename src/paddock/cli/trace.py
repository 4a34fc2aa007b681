"""`paddock trace list|show|view|export`: what the store knows of rollouts."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddock.cli import note, print_json
from paddock.cli.trace_export import command as export_command
from paddock.errors import StoreError

if TYPE_CHECKING:
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.store import Store
    from paddock.rollouts.trace import Call

store_option = click.option(
    "--store", type=click.Path(path_type=Path), help="Where rollouts are kept. Also: PADDOCK_STORE."
)
SHOWN = 600


@click.group("trace")
def command() -> None:
    """Look at rollouts, and take them out of the store."""


@command.command("list")
@store_option
@click.option("--task", "task_id", help="Only rollouts of this task.")
@click.option("--agent", help="Only rollouts of this agent.")
@click.option("--model", help="Only rollouts of this model.")
@click.option("--outcome", help="Only rollouts that ended so.")
@click.option("--batch", "batch_id", help="Only rollouts of this batch.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="At most so many, the newest first."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def list_command(store: Path | None, limit: int, as_json: bool, **filters: Any) -> int:
    """List rollouts, the newest first."""
    from paddock.rollouts.shown import summarize

    with opened(store) as kept:
        records = list(kept.list(limit=limit, **filters))
        total = kept.count(**filters)
    if as_json:
        for record in records:
            print_json(summarize(record))
    else:
        print_list(records)
    if total > len(records):
        note(f"{len(records)} of {total} shown; --limit shows more")
    if not total and not as_json:
        chosen = [f"--{name.removesuffix('_id')} {value}" for name, value in filters.items() if value]
        made = "the store holds no rollouts; paddock rollout TASK --model … makes some"
        note(f"no rollout matches {' '.join(chosen)}" if chosen else made)
    return 0


@command.command("show")
@click.argument("rollout_id", metavar="ID")
@store_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def show_command(rollout_id: str, store: Path | None, as_json: bool) -> int:
    """Show one rollout: how it ended, and each of its calls. A unique beginning of the id is enough."""
    from paddock.rollouts.shown import rollout_to_json

    with opened(store) as kept:
        record = found(kept, rollout_id)
        calls = kept.calls(record.rollout_id)
        events = kept.events(record.rollout_id)
        scores = kept.scores(record.rollout_id)
    if as_json:
        print_json(rollout_to_json(record, calls, events, scores))
        return 0
    print_record(record)
    print_calls(calls)
    return 0


@command.command("view")
@click.argument("rollout_id", metavar="ID")
@store_option
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON once it listens.")
def view_command(rollout_id: str, store: Path | None, no_open: bool, as_json: bool) -> None:
    """Look at one rollout in the browser. A unique beginning of the id is enough."""
    from paddock.cli.view import view

    with opened(store) as kept:
        name = found(kept, rollout_id).rollout_id
    view(store, opens=not no_open, as_json=as_json, place=f"#/rollouts/{name}")


command.add_command(export_command)


def opened(store: Path | None) -> Any:
    from contextlib import closing

    from paddock.rollouts.store import Store

    return closing(Store.open(store, read_only=True))


def found(store: Store, rollout_id: str) -> RolloutRecord:
    record = store.get(rollout_id)
    if record is None:
        raise StoreError(f"there is no rollout {rollout_id!r}", hint="paddock trace list shows them")
    return record


def print_list(records: list[RolloutRecord]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rollout", "task", "agent", "model", "outcome", "reward", "calls", "seconds", "when"):
        table.add_column(name, justify="right" if name in ("reward", "calls", "seconds") else "left")
    for record in records:
        table.add_row(
            record.rollout_id,
            record.task_id,
            record.agent,
            record.model,
            str(record.outcome or f"({record.stage})"),
            "–" if record.reward is None else f"{record.reward:g}",
            str(record.calls),
            "" if record.wall_s is None else f"{record.wall_s:.1f}",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started_at)),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def print_record(record: RolloutRecord) -> None:
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in record.stages.items())
    reward = f"{record.reward:g}" if record.reward is not None else f"none: {record.reward_reason}"
    lines = {
        "rollout": record.rollout_id,
        "task": record.task_id,
        "agent": f"{record.agent} ({record.driver}) in {record.sandbox}",
        "model": record.model,
        "outcome": f"{record.outcome or record.stage}" + (f": {record.error}" if record.error else ""),
        "reward": reward,
        "stages": stages,
        "calls": f"{record.calls}, {record.trainable_calls} trainable; capture level {record.level}",
        "files": ", ".join(record.workdir_files[:20]),
    }
    for name, value in lines.items():
        click.echo(f"{name + ':':<9}{value}")
    for name, text in (("verifier", record.verifier_stdout + record.verifier_stderr), ("agent", record.agent_log)):
        if text.strip():
            click.echo(f"\n--- {name}, last words ---\n{text.strip()[-SHOWN:]}")


def print_calls(calls: list[Call]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("call", "role", "caller", "prompt", "sampled", "finish", "seconds", "parent", "says"):
        table.add_column(name, justify="right" if name in ("prompt", "sampled", "seconds") else "left")
    for call in calls:
        seconds = "" if call.ended is None else f"{call.ended - call.started:.2f}"
        parent = "" if call.parent is None else f"{call.parent} +{call.shared_tokens}"
        table.add_row(
            call.id,
            call.role,
            call.caller,
            str(len(call.prompt_token_ids)),
            str(len(call.completion_token_ids)),
            Text(call.error or call.finish_reason or ""),
            seconds,
            parent,
            Text(gist(call)),
        )
    click.echo()
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for told in dict.fromkeys((call.temperature, call.logprobs_kind) for call in calls):
        click.echo(f"temperature: {'left to the endpoint' if told[0] is None else told[0]}, {told[1]} logprobs")
    for call in calls:
        if call.caller == "foreign":
            click.echo(f"{call.id}: {call.untrainable_because}")


def gist(call: Call) -> str:
    """The beginning of what was sampled: the text, or the tools it called."""
    tools = [str((tool.get("function") or {}).get("name")) for tool in call.message.get("tool_calls") or []]
    text = str(call.message.get("content") or "").strip().replace("\n", " ")
    return " ".join(part for part in (text[:50], *(f"[{name}]" for name in tools)) if part)
