"""`paddock agents`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass

import click

from paddock.cli import note, print_json
from paddock.cli.interrupts import run_async
from paddock.errors import AgentError

FETCH_SECONDS = 600.0
PARALLEL_FETCHES = 3
ALL = "all"


@dataclass(frozen=True, slots=True)
class Row:
    """An agent, and whether it is installed."""

    name: str
    version: str
    dialect: str
    drivers: tuple[str, ...]
    size_mb: int
    installed: bool
    live_events: bool
    clean_abort: bool


@click.command("agents", epilog="Then: paddock rollout TASK --agent NAME")
@click.option("--install", "requested", multiple=True, metavar="NAME|all", help="Fetch an agent. May be repeated.")
@click.option("--timeout", default=FETCH_SECONDS, show_default=True, help="Seconds that fetching one may take.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def command(requested: tuple[str, ...], timeout: float, as_json: bool) -> None:
    """List the agents: their release, the API they use for models, and whether they are installed.

    An agent is fetched once, by --install or by its first rollout. Then it needs no network.
    """
    rows = run_async(examine(requested, timeout))
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        print_table(rows)


async def examine(requested: tuple[str, ...], timeout: float) -> list[Row]:
    from paddock.agents import AGENTS, find_agent, load_agent
    from paddock.agents.install import is_installed

    names = [name for name in AGENTS if find_agent(name).version]
    await fetch(names if ALL in requested else list(dict.fromkeys(requested)), timeout)
    rows = []
    for name in names:
        agent = load_agent(name)
        rows.append(
            Row(
                name=name,
                version=agent.version,
                dialect=agent.dialect,
                drivers=agent.drivers,
                size_mb=agent.size_mb,
                installed=await is_installed(agent),
                live_events=agent.live_events,
                clean_abort=agent.clean_abort,
            )
        )
    return rows


async def fetch(names: list[str], timeout: float) -> None:
    """Install all of them, a few in parallel. A failure does not stop the others; it is raised at the end."""
    from paddock.agents import load_agent

    agents = [load_agent(name) for name in names]
    slots = asyncio.Semaphore(PARALLEL_FETCHES)

    async def one(position: int) -> None:
        async with slots:
            await agents[position].install(note, timeout=timeout)

    results = await asyncio.gather(*(one(position) for position in range(len(agents))), return_exceptions=True)
    failures = [(name, result) for name, result in zip(names, results, strict=True) if result is not None]
    for name, failure in failures:
        if not isinstance(failure, AgentError):
            raise failure
        note(f"{name} is not here: {failure.message}")
    if failures:
        missing = ", ".join(name for name, _ in failures)
        raise AgentError(f"could not fetch {missing}", hint="the output of npm or pip is above")


def print_table(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("agent", "release", "dialect", "drivers", "size", "here", "events", "abort"):
        table.add_column(heading, no_wrap=True, justify="right" if heading == "size" else "left")
    for row in rows:
        table.add_row(
            row.name,
            row.version,
            row.dialect,
            ", ".join(row.drivers),
            f"{row.size_mb} MB" if row.size_mb else "-",
            "[green]yes[/green]" if row.installed else "no",
            "live" if row.live_events else "no",
            "asked" if row.clean_abort else "killed",
        )
    Console().print(table)
    missing = [row.name for row in rows if not row.installed]
    if missing:
        note(f"hint: paddock agents --install {missing[0] if len(missing) == 1 else ALL}")
