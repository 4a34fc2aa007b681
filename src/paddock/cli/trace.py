"""`paddock trace list|show|view|tag|rm|prune|export`: rollouts in the store."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddock.cli import note, print_json
from paddock.cli.store_options import rollout_filters, store_option
from paddock.cli.trace_changes import print_changes, print_changes_of
from paddock.cli.trace_delete import prune_command, remove_command
from paddock.cli.trace_export import command as export_command
from paddock.cli.trace_fidelity import describe_fork, print_differences
from paddock.cli.trace_tag import command as tag_command
from paddock.cli.trace_tree import print_tree
from paddock.errors import SandboxError, StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.capture.trace import Call
    from paddock.store import Store
    from paddock.store.record import RolloutRecord

SHOWN_CONNECTIONS = 50
LINE_CHARACTERS = 240
LOG_CHARACTERS = 1500
"""How many characters of the end of a log `show` prints."""
LISTED_FILES = 20
CALL_COLUMNS = ("role", "caller", "prompt", "sampled", "finish", "seconds", "parent", "says")


@click.group("trace")
def command() -> None:
    """List, show, export, tag and delete rollouts."""


@command.command("list")
@store_option()
@rollout_filters
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Show at most this many, the newest first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def list_command(store: Path | None, limit: int, as_json: bool, **filters: Any) -> int:
    """List rollouts, the newest first."""
    from paddock.rollouts.rollout_json import summarize

    with open_store(store) as opened:
        records = list(opened.list(limit=limit, **filters))
        total = opened.count(**filters)
    if as_json:
        for record in records:
            print_json(summarize(record))
    else:
        print_list(records)
    if total > len(records):
        note(f"{len(records)} of {total} shown; --limit shows more")
    if not total and not as_json:
        options = [f"--{name.removesuffix('_id')} {value}" for name, value in filters.items() if value]
        empty = "the store holds no rollouts; paddock rollout TASK --model … makes some"
        note(f"no rollout matches {' '.join(options)}" if options else empty)
    return 0


@command.command("show")
@click.argument("rollout_id", metavar="ID")
@store_option()
@click.option(
    "--artifacts", "folder", type=click.Path(path_type=Path), help="Write the artifacts to this new folder, too."
)
@click.option("--changes", "changed_by", metavar="CALL", help="Print what this call changed in the work folder.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def show_command(
    rollout_id: str, store: Path | None, folder: Path | None, changed_by: str | None, as_json: bool
) -> int:
    """Show one rollout: how it ended, and each of its calls.

    ID is an id, a unique beginning of one, or `latest`.
    """
    from paddock.rollouts.rollout_json import rollout_to_json

    with open_store(store) as opened:
        record = find_record(opened, rollout_id)
        if folder is not None:
            write_artifacts(opened, record, folder)
        calls = opened.calls(record.rollout_id)
        if changed_by is not None:
            print_changes_of(opened, record, calls, changed_by, as_json=as_json)
            return 0
        events = opened.events(record.rollout_id)
        if as_json:
            print_json(rollout_to_json(record, calls, events, opened.scores(record.rollout_id)))
            return 0
        print_record(record, opened.tags(record.rollout_id))
        print_sandbox(record)
        for _, event in events:
            if event.kind == "warning":
                click.echo(f"warning: {event.data.get('warning')}")
        print_logs(record)
        print_calls(calls)
        print_differences(record)
        print_changes(opened, record, calls)
        print_tree(opened.tree(record.rollout_id), record.rollout_id)
    return 0


@command.command("view")
@click.argument("rollout_id", metavar="ID")
@store_option()
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON once it listens.")
def view_command(rollout_id: str, store: Path | None, no_open: bool, as_json: bool) -> None:
    """Show one rollout in the browser.

    ID is an id, a unique beginning of one, or `latest`.
    """
    from paddock.cli.view import view

    with open_store(store) as opened:
        name = find_record(opened, rollout_id).rollout_id
    view(store, open_browser=not no_open, as_json=as_json, fragment=f"#/rollouts/{name}")


command.add_command(export_command)
command.add_command(tag_command)
command.add_command(remove_command)
command.add_command(prune_command)


def open_store(folder: Path | None) -> Store:
    from paddock.store import Store

    return Store.open(folder, read_only=True)


def find_record(store: Store, rollout_id: str) -> RolloutRecord:
    record = store.get(rollout_id)
    if record is None:
        raise StoreError(f"there is no rollout {rollout_id!r}", hint="paddock trace list shows them")
    return record


def write_artifacts(store: Store, record: RolloutRecord, folder: Path) -> None:
    """Unpack the artifacts of a rollout below a folder that is new or empty. Raises StoreError."""
    from paddock.sandbox.guest.files import unpack_folder

    if record.artifact_blob is None:
        raise StoreError(
            f"rollout {record.rollout_id} has no artifacts", hint="docs/tasks.md says which files are kept"
        )
    archive = store.get_blob(record.artifact_blob)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise StoreError(f"{folder} is not empty", hint="name a new folder")
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"{folder} cannot be written to: {error.strerror}", hint="name a new folder") from error
    try:
        unpack_folder(descriptor, (), archive, top=None)
    except SandboxError as error:
        raise StoreError(f"the artifacts cannot be written to {folder}: {error}", hint=error.hint) from error
    finally:
        os.close(descriptor)
    note(f"{len(record.artifacts)} files written to {folder}")


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
            str(record.call_count),
            "" if record.wall_s is None else f"{record.wall_s:.1f}",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started_at)),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def print_record(record: RolloutRecord, tags: list[str]) -> None:
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in record.stages.items())
    reward = f"{record.reward:g}" if record.reward is not None else f"none: {record.reward_reason}"
    lines = {
        "rollout": record.rollout_id,
        "task": record.task_id,
        "tags": " ".join(tags),
        "agent": f"{record.agent} ({record.driver}) in {record.sandbox}",
        "model": record.model,
        **describe_fork(record),
        "outcome": f"{record.outcome or record.stage}" + (f": {record.error}" if record.error else ""),
        "reward": reward,
        "verifier": ": ".join(str(record.verifier[key]) for key in ("mode", "reason") if record.verifier.get(key)),
        "stages": stages,
        "pauses": f"{record.pauses['count']}, {record.pauses['seconds']:.1f} s" if record.pauses else "",
        "calls": f"{record.call_count}, {record.trainable_calls} trainable; capture level {record.level}",
        "files": ", ".join(record.workdir_files[:LISTED_FILES]),
        "artifacts": ", ".join(str(file["path"]) for file in record.artifacts[:LISTED_FILES]),
    }
    for name, value in lines.items():
        if value or name not in ("tags", "verifier", "artifacts", "pauses"):
            click.echo(f"{name + ':':<11}{value}")
    for step in record.steps:
        click.echo(f"step {step['name']}: {describe_step(step)}")


def print_sandbox(record: RolloutRecord) -> None:
    """Where it ran: the image, how its limits were enforced, and what it connected to."""
    lines = {
        "image": image_text(record.image),
        "tests on": image_text(record.verifier_image),
        "users": record.user_ids,
        "limits": f"\n{'':<11}".join(f"{name}: {how}" for name, how in record.limits.items()),
    }
    for name, value in lines.items():
        if value:
            click.echo(f"{name + ':':<11}{value}")
    for connection in record.connections[:SHOWN_CONNECTIONS]:
        click.echo(f"network:   {connection['phase']}: {connection_text(connection)}")
    if len(record.connections) > SHOWN_CONNECTIONS:
        click.echo(f"network:   {len(record.connections) - SHOWN_CONNECTIONS} more connections; --json has all")


def print_logs(record: RolloutRecord) -> None:
    verifier = record.verifier_stdout + record.verifier_stderr
    for name, text in (("build", record.build_log), ("verifier", verifier), ("agent", record.agent_log)):
        if text.strip():
            click.echo(f"\n--- {name}, last lines ---\n{last_lines(text)}")


def last_lines(text: str) -> str:
    """The whole lines at the end of a log that fit, or the end of the last line where none does. Long lines, as of an
    agent that prints JSON, are shortened."""
    lines = [line if len(line) <= LINE_CHARACTERS else line[: LINE_CHARACTERS - 1] + "…" for line in text.split("\n")]
    shortened = "\n".join(lines).strip()
    if len(shortened) <= LOG_CHARACTERS:
        return shortened
    return shortened[-LOG_CHARACTERS:].partition("\n")[2] or shortened[-LOG_CHARACTERS:]


def image_text(image: dict[str, Any]) -> str:
    return " ".join(str(image[name]) for name in ("name", "digest", "platform") if image.get(name))


def connection_text(connection: dict[str, Any]) -> str:
    place = f"{connection['host']}:{connection['port']}"
    if not connection["allowed"]:
        return f"{place} refused: {connection['reason']}"
    sizes = f"sent {connection['sent_bytes']} bytes, received {connection['received_bytes']}"
    return f"{place} allowed, {sizes}" + (f": {connection['reason']}" if connection["reason"] else "")


def describe_step(step: Mapping[str, Any]) -> str:
    """How a step of a task went, on one line."""
    if step["started_at"] is None:
        return str(step["reward_reason"])
    reward = f"reward {step['reward']:g}" if step["reward"] is not None else f"no reward: {step['reward_reason']}"
    ending = f"{step['outcome'] or 'not ended'}{': ' + step['error'] if step['error'] else ''}"
    seconds = "" if step["seconds"] is None else f", {step['seconds']:.1f} s"
    mode = f", {step['verifier']['mode']} tests" if step["verifier"] else ""
    code = "" if step["exit_code"] is None else f", exit code {step['exit_code']}"
    return f"{ending}, {reward}{seconds}{code}{mode}, {step['calls']} calls"


def print_calls(calls: list[Call]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    has_steps = any(call.step for call in calls)
    for name in ("call", *(["step"] if has_steps else []), *CALL_COLUMNS):
        table.add_column(name, justify="right" if name in ("prompt", "sampled", "seconds") else "left")
    for call in calls:
        seconds = "" if call.ended is None else f"{call.ended - call.started:.2f}"
        parent = "" if call.parent is None else f"{call.parent} +{call.shared_tokens}"
        table.add_row(
            call.id,
            *([call.step] if has_steps else []),
            call.role,
            call.caller,
            str(len(call.prompt_token_ids)),
            str(len(call.completion_token_ids)),
            Text(call.error or call.finish_reason or ""),
            seconds,
            parent,
            Text(summarize_answer(call)),
        )
    click.echo()
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for temperature, kind in dict.fromkeys((call.temperature, call.logprobs_kind) for call in calls):
        click.echo(f"temperature: {'left to the endpoint' if temperature is None else temperature}, {kind} logprobs")
    for call in calls:
        if call.token_mode is not None and (reason := call.token_mode.get("reason")):
            click.echo(f"{call.id}: {call.token_mode['render']} render: {reason}")
        if call.caller == "foreign":
            click.echo(f"{call.id}: {call.untrainable_because}")


def summarize_answer(call: Call) -> str:
    """The beginning of what was sampled: the text, or the tools it called."""
    tools = [str((tool.get("function") or {}).get("name")) for tool in call.message.get("tool_calls") or []]
    text = str(call.message.get("content") or "").strip().replace("\n", " ")
    return " ".join(part for part in (text[:50], *(f"[{name}]" for name in tools)) if part)
