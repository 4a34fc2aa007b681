"""How a fork compares with the recorded rollout, for `paddock trace show`: a line, and the requests that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from paddock.store.record import RolloutRecord

SHOWN_CALLS = 5
SHOWN_LINES = 12
"""Of each difference. `--json` has all."""


def describe_fork(record: RolloutRecord) -> dict[str, str]:
    """The line about the rollout that this one replayed; none if it replayed none."""
    if not record.fork:
        return {}
    fidelity = record.fork.get("fidelity") or {}
    place = "its last call" if record.fork.get("at") is None else f"c{record.fork['at']}"
    state = f"; {fidelity['replayed_calls']} calls replayed, {fidelity['state']}" if fidelity else ""
    if fidelity.get("files"):
        from paddock.rollouts.folder_fidelity import describe_files

        state += f"; {describe_files(fidelity['files'])}"
    return {"replays": f"{record.fork['source']} up to {place}{state}"}


def print_differences(record: RolloutRecord) -> None:
    """The requests that differ from the recorded ones, and how. Nothing if all are equal."""
    fidelity = record.fork.get("fidelity") or {}
    different: list[dict[str, Any]] = fidelity.get("different_calls") or []
    if not different:
        return
    click.echo(f"\n--- requests that differ from those of {record.fork['source']} ---")
    for entry in different[:SHOWN_CALLS]:
        click.secho(f"{entry['call']} ({entry['fidelity']}, recorded as {entry['recorded']})", bold=True)
        lines = entry["difference"].splitlines()
        for line in lines[:SHOWN_LINES]:
            click.secho(line, fg={"+": "green", "-": "red"}.get(line[:1]))
        if len(lines) > SHOWN_LINES:
            click.echo(f"… {len(lines) - SHOWN_LINES} more lines; --json has all")
    if len(different) > SHOWN_CALLS:
        click.echo(f"… {len(different) - SHOWN_CALLS} more requests differ; --json has all")
