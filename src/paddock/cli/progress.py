"""Progress of rollouts on stderr: a line for each that is running, and a bar for all of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from paddock.cli import plural

if TYPE_CHECKING:
    from paddock.rollouts.rollout import Rollout
    from paddock.store.record import RolloutRecord

COLOURS = {"ok": "green", "cancelled": "yellow", "timeout": "yellow", "budget": "yellow"}


class RolloutProgress:
    """A live display on a terminal; elsewhere one line for each rollout that has ended."""

    def __init__(self, *, total: int, lines: bool) -> None:
        self._console = Console(stderr=True)
        self._lines = lines
        self._running: dict[str, RolloutRecord] = {}
        columns = (TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console)
        self._task = self._bar.add_task("", total=total)
        is_live = self._console.is_terminal
        self._live = Live(get_renderable=self._render, console=self._console, transient=True) if is_live else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def log(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)

    def show(self, rollout: Rollout) -> None:
        record = rollout.record
        if record.finished:
            self._running.pop(record.rollout_id, None)
        else:
            self._running[record.rollout_id] = record

    def settle(self, record: RolloutRecord) -> None:
        self._running.pop(record.rollout_id, None)
        self._bar.advance(self._task)
        if self._lines and self._live is None:
            self._console.print(summary_line(record), highlight=False)

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False, show_header=False)
        for record in self._running.values():
            table.add_row(
                Text(f"{record.task_id} #{record.member}"),
                Text(record.stage, style="cyan"),
                Text(plural(record.call_count, "call")),
                Text(plural(record.completion_tokens, "token")),
                Text(f"{time.time() - record.started_at:.0f} s"),
            )
        return Group(table, self._bar)


def summary_line(record: RolloutRecord) -> Text:
    """`write-program #0: ok, reward 1, 4 calls, 2.3 s`"""
    line = Text(f"{record.task_id} #{record.member}: ")
    line.append(str(record.outcome), style=COLOURS.get(str(record.outcome), "red"))
    reward = "no reward" if record.reward is None else f"reward {record.reward:g}"
    return line.append(f", {reward}, {plural(record.call_count, 'call')}, {record.wall_s or 0:.1f} s")
