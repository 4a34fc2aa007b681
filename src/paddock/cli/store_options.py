"""Options of several commands: which store, and which of its rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CommandT = TypeVar("CommandT", bound="Callable[..., Any]")


def store_option(help_text: str = "Where rollouts are kept.") -> Callable[[CommandT], CommandT]:
    return click.option("--store", type=click.Path(path_type=Path), help=f"{help_text} Also: PADDOCK_STORE.")


def _check_outcome(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    # Not the type of the option: `--help` would import the store.
    from paddock.store.outcome import Outcome

    return None if value is None else str(click.Choice([*map(str, Outcome)]).convert(value, option, context))


def rollout_filters(command: CommandT) -> CommandT:
    """Options with the names of the filters of `Store.list`."""
    for option in reversed(
        (
            click.option("--task", "task_id", help="Only rollouts of this task."),
            click.option("--agent", help="Only rollouts of this agent."),
            click.option("--model", help="Only rollouts of this model."),
            click.option("--outcome", callback=_check_outcome, help="Only rollouts with this outcome."),
            click.option("--batch", "batch_id", help="Only rollouts of this batch."),
            click.option("--tag", help="Only rollouts with this tag."),
        )
    ):
        command = option(command)
    return command
