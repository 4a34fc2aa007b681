"""The measures: which servers are pressed by which load, and the ratio to reach.

Each measure is a function that runs its servers, takes its samples and returns its rows.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from scripts.peers import peer_python

from bench.footprint import idle_footprint
from bench.results import Row
from bench.samples import Sample, interleave, press
from bench.servers import Server, ServerSpec, running
from bench.work import calibrate

THREAD_COUNTER = "bench/envs.py:ThreadCounter"
SLEEP_COUNTER = "bench/envs.py:SleepCounter"
BUSY_COUNTER = "bench/envs.py:BusyCounter"
INLINE_BUSY_COUNTER = "bench/envs.py:InlineBusyCounter"

STEP_TARGETS = {1: 2.0, 16: 6.0, 128: 8.0, 512: 11.0}
THREAD_STEP_TARGETS = {1: 1.3, 16: 2.7, 128: 5.0, 512: 5.5}
CLIENT_TARGETS = {1: 3.5, 16: 7.0, 64: 8.0}
GENERIC_CLIENT_TARGET = 0.9
LATENCY_SESSIONS, LATENCY_TARGET = 128, 10.0
TOOL_CONNECTIONS, TOOL_TARGET = 16, 30.0
SLEEP_SESSIONS, SLEEP_TARGET = 512, 3.0
MEMORY_TARGET, THREAD_LIMIT = 3.0, 100
OPEN_TARGET = 2.0
VECTOR_SESSIONS, VECTOR_TARGET = 1000, 20.0
BUSY_SESSIONS, BUSY_TARGET = 128, 3.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How long and how often to measure."""

    seconds: float = 2.0
    """Length of one sample."""

    rounds: int = 5
    idle_sessions: int = 4000
    opens: int = 2000


QUICK = Settings(seconds=1.0, rounds=1, idle_sessions=1000, opens=500)
"""Enough to see that everything runs; too short to quote."""


def measure_steps(settings: Settings) -> list[Row]:
    """`/ws` steps per second and p99 latency, a counter whose step runs inline."""
    return _step_rows("steps, inline", "counter", STEP_TARGETS, settings, latency=True)


def measure_thread_steps(settings: Settings) -> list[Row]:
    """`/ws` steps per second, the same counter on threads."""
    return _step_rows("steps, threads", THREAD_COUNTER, THREAD_STEP_TARGETS, settings)


def measure_tools(settings: Settings) -> list[Row]:
    """`/mcp` tools/call per second over HTTP, in a session."""

    def load(server: Server) -> Sample:
        return press(server, "tools", sessions=TOOL_CONNECTIONS, seconds=settings.seconds)

    with ExitStack() as stack:
        servers = _pair(stack, "echo", "echo", 2 * TOOL_CONNECTIONS)
        paddock, openenv = interleave("tools", servers, load, settings.rounds)
    label = f"tool calls, HTTP, {TOOL_CONNECTIONS} connections"
    return [_rate_row(label, "calls/s", paddock, openenv, TOOL_TARGET)]


def measure_sleep(settings: Settings) -> list[Row]:
    """`/ws` steps per second of a step that blocks for 5 ms."""
    with ExitStack() as stack:
        servers = _pair(stack, SLEEP_COUNTER, "sleep", SLEEP_SESSIONS)
        load = _stepping(SLEEP_SESSIONS, settings)
        paddock, openenv = interleave("sleep", servers, load, settings.rounds)
    label = f"steps that sleep 5 ms, {SLEEP_SESSIONS} sessions"
    return [_rate_row(label, "steps/s", paddock, openenv, SLEEP_TARGET)]


def measure_idle(settings: Settings) -> list[Row]:
    """Memory per idle session and the number of threads. Taken once: neither is noisy."""
    count = settings.idle_sessions
    paddock = idle_footprint(ServerSpec("paddock", THREAD_COUNTER, count), count)
    openenv = idle_footprint(ServerSpec("openenv", "counter", count), count)
    return [
        Row(
            f"memory per idle session, {count:,} sessions",
            "KiB",
            [paddock.session_kibibytes],
            [openenv.session_kibibytes],
            target=MEMORY_TARGET,
            lower_is_better=True,
        ),
        Row(
            f"threads, {count:,} sessions",
            "threads",
            [paddock.threads],
            [openenv.threads],
            limit=THREAD_LIMIT,
            lower_is_better=True,
        ),
    ]


def measure_opens(settings: Settings) -> list[Row]:
    """Sessions opened (connect, reset, answer) per second."""

    def load(server: Server) -> Sample:
        return press(server, "opens", sessions=settings.opens)

    with ExitStack() as stack:
        servers = _pair(stack, "counter", "counter", 2 * settings.opens)
        paddock, openenv = interleave("opens", servers, load, settings.rounds)
    label = f"sessions opened, {settings.opens:,} by 32 openers"
    return [_rate_row(label, "opens/s", paddock, openenv, OPEN_TARGET)]


def measure_vector(settings: Settings) -> list[Row]:
    """Sessions stepped from one process, each project's own client on its own server."""

    def load(server: Server) -> Sample:
        ours = server.spec.project == "paddock"
        return press(
            server,
            "vector" if ours else "openenv_clients",
            python=sys.executable if ours else str(peer_python("openenv")),
            sessions=VECTOR_SESSIONS,
            seconds=settings.seconds,
        )

    with ExitStack() as stack:
        servers = _pair(stack, "counter", "counter", 2 * VECTOR_SESSIONS)
        paddock, openenv = interleave("vector", servers, load, settings.rounds)
    label = f"own client, {VECTOR_SESSIONS:,} sessions, one process"
    return [_rate_row(label, "steps/s", paddock, openenv, VECTOR_TARGET)]


def measure_clients(settings: Settings) -> list[Row]:
    """Each project's own client on its own server, and with one session both clients on ours."""

    def own_client(server: Server) -> Sample:
        return _client_load(server, server.spec.project, sessions, settings)

    rows = []
    with ExitStack() as stack:
        servers = _pair(stack, "counter", "counter", 2 * max(CLIENT_TARGETS))
        for sessions, target in CLIENT_TARGETS.items():
            label = f"own client, {sessions} session{'s' if sessions > 1 else ''}"
            paddock, openenv = interleave(label, servers, own_client, settings.rounds)
            rows.append(_rate_row(label, "steps/s", paddock, openenv, target))
        projects = iter(["paddock", "openenv"] * settings.rounds)
        ours = [servers[0], servers[0]]
        label = "Client : GenericEnvClient, both on Paddock, 1 session"
        paddock, openenv = interleave(
            label, ours, lambda server: _client_load(server, next(projects), 1, settings), settings.rounds
        )
        rows.append(_rate_row(label, "steps/s", paddock, openenv, GENERIC_CLIENT_TARGET))
    return rows


def _client_load(server: Server, project: str, sessions: int, settings: Settings) -> Sample:
    """Clients of one project, each in its own loop."""
    ours = project == "paddock"
    return press(
        server,
        "clients" if ours else "openenv_loops",
        python=sys.executable if ours else str(peer_python("openenv")),
        sessions=sessions,
        seconds=settings.seconds,
    )


def measure_busy(settings: Settings) -> list[Row]:
    """`/ws` steps per second of a step that computes for 200 us, on two workers."""
    calibrate()
    specs = [
        ServerSpec("paddock", BUSY_COUNTER, 2 * BUSY_SESSIONS, workers=2),
        ServerSpec("paddock", INLINE_BUSY_COUNTER, 2 * BUSY_SESSIONS, workers=2),
        ServerSpec("openenv", "busy", 2 * BUSY_SESSIONS),
        ServerSpec("openenv", "busy", 2 * BUSY_SESSIONS, workers=2),
    ]
    with ExitStack() as stack:
        servers = [stack.enter_context(running(spec)) for spec in specs]
        load = _stepping(BUSY_SESSIONS, settings)
        threads, inline, one, two = interleave("busy", servers, load, settings.rounds)
    label = f"steps of 200 us, {BUSY_SESSIONS} sessions"
    return [
        _rate_row(f"{label}, 2 workers : 1", "steps/s", threads, one, BUSY_TARGET),
        _rate_row(f"{label}, inline, 2 workers : 1", "steps/s", inline, one, None),
        _rate_row(f"{label}, 2 workers : 2", "steps/s", threads, two, None),
    ]


MEASURES: dict[str, Callable[[Settings], list[Row]]] = {
    "steps": measure_steps,
    "threads": measure_thread_steps,
    "tools": measure_tools,
    "sleep": measure_sleep,
    "idle": measure_idle,
    "opens": measure_opens,
    "vector": measure_vector,
    "clients": measure_clients,
    "busy": measure_busy,
}


def _step_rows(
    label: str, target: str, ratios: dict[int, float], settings: Settings, latency: bool = False
) -> list[Row]:
    rows = []
    with ExitStack() as stack:
        servers = _pair(stack, target, "counter", 2 * max(ratios))
        for sessions, ratio in ratios.items():
            name = f"{label}, {sessions} session{'s' if sessions > 1 else ''}"
            load = _stepping(sessions, settings)
            paddock, openenv = interleave(name, servers, load, settings.rounds)
            rows.append(_rate_row(name, "steps/s", paddock, openenv, ratio))
            if latency and sessions == LATENCY_SESSIONS:
                rows.append(_latency_row(paddock, openenv))
    return rows


def _pair(stack: ExitStack, ours: str, theirs: str, max_sessions: int) -> list[Server]:
    specs = [
        ServerSpec("paddock", ours, max_sessions),
        ServerSpec("openenv", theirs, max_sessions),
    ]
    return [stack.enter_context(running(spec)) for spec in specs]


def _stepping(sessions: int, settings: Settings) -> Callable[[Server], Sample]:
    def load(server: Server) -> Sample:
        return press(server, "steps", sessions=sessions, seconds=settings.seconds)

    return load


def _rate_row(measure: str, unit: str, paddock: list[Sample], openenv: list[Sample], target: float | None) -> Row:
    ours = [sample.rate for sample in paddock]
    theirs = [sample.rate for sample in openenv]
    share = max(sample.generator_cpu_share for sample in paddock + openenv)
    return Row(measure, unit, ours, theirs, target, generator_cpu_share=share)


def _latency_row(paddock: list[Sample], openenv: list[Sample]) -> Row:
    ours = [sample.p99_ms for sample in paddock if sample.p99_ms is not None]
    theirs = [sample.p99_ms for sample in openenv if sample.p99_ms is not None]
    label = f"p99 latency, inline, {LATENCY_SESSIONS} sessions"
    return Row(label, "ms", ours, theirs, LATENCY_TARGET, lower_is_better=True)
