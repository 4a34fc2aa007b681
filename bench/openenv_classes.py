"""OpenEnv's environment classes, unmodified, on our server and on their own: steps per second side by side.

    python -m bench.openenv_classes                              # the classes of openenv_app.py
    python -m bench.openenv_classes 'path/to/connect4_env={"column":3}' …

Ours runs them both ways: where OpenEnv is installed beside Paddock (`openenv:pkg.mod:Class`), and moved into
OpenEnv's own virtual environment (`openenv:PLACE@VENV`), which is all that a folder allows. A class that does not
declare itself safe for concurrent sessions is stepped in one.
"""

import argparse
import sys
from contextlib import ExitStack
from dataclasses import dataclass

from scripts.peers import peer_python

from bench.results import Row, table
from bench.samples import Sample, interleave, note, press
from bench.servers import HOST, Server, ServerSpec, running

TARGET = 2.0
SESSIONS = (1, 16, 128)
CLASSES = {
    "bench.openenv_app:Counter": '{"amount":0}',
    "bench.openenv_app:BusyCounter": '{"amount":0}',
    "bench.openenv_app:Echo": '{"type":"call_tool","tool_name":"echo_message","arguments":{"message":"hello"}}',
}


@dataclass(frozen=True, slots=True)
class ClassSpec(ServerSpec):
    """A server for a class of OpenEnv's kind."""

    inside: bool = False
    """Whether OpenEnv is installed beside Paddock."""

    def command(self, port: int) -> list[str]:
        options = ["--host", HOST, "--port", str(port), "--max-sessions", str(self.max_sessions)]
        if self.inside:
            return [str(peer_python("both")), "-m", "paddock", "serve", f"openenv:{self.target}", *options]
        if self.project == "paddock":
            target = f"openenv:{self.target}@{peer_python('openenv')}"
            return [sys.executable, "-m", "paddock", "serve", target, *options]
        return [str(peer_python("openenv")), "-m", "bench.openenv_class_app", self.target, *options]


def measure(place: str, action: str, sessions: int, *, seconds: float, rounds: int) -> list[Row]:
    """Raises RuntimeError when a server does not start."""

    def load(server: Server) -> Sample:
        return press(server, "steps", sessions=sessions, seconds=seconds, action=action)

    name = place.rstrip("/").rpartition(":")[2].rpartition("/")[2]
    label = f"{name}, {sessions} session{'s' if sessions > 1 else ''}"
    most = 1 if sessions == 1 else 2 * sessions
    ways = {"@VENV": False, **({"beside": True} if ":" in place else {})}
    with ExitStack() as stack:
        specs = [ClassSpec("paddock", place, most, inside=inside) for inside in ways.values()]
        servers = [stack.enter_context(running(spec)) for spec in (*specs, ClassSpec("openenv", place, most))]
        *ours, theirs = interleave(label, servers, load, rounds)
    return [_row(f"{label}, {way}", samples, theirs) for way, samples in zip(ways, ours, strict=True)]


def _row(label: str, ours: list[Sample], theirs: list[Sample]) -> Row:
    share = max(sample.generator_cpu_share for sample in ours + theirs)
    rates = ([sample.rate for sample in ours], [sample.rate for sample in theirs])
    return Row(label, "steps/s", *rates, TARGET, generator_cpu_share=share)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.openenv_classes", description=__doc__)
    parser.add_argument(
        "places", nargs="*", metavar="PLACE=ACTION", help="a folder or a class, and an action in JSON"
    )
    parser.add_argument("--sessions", type=int, nargs="+", default=list(SESSIONS))
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    chosen = dict(each.split("=", 1) for each in options.places) or CLASSES
    rows: list[Row] = []
    failures = 0
    for place, action in chosen.items():
        for sessions in options.sessions:
            try:
                rows += measure(place, action, sessions, seconds=options.seconds, rounds=options.rounds)
            except (RuntimeError, TimeoutError) as error:
                failures += 1
                note(f"error: {place} with {sessions} sessions was not measured: {str(error)[-400:]}")
    print(table(rows))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
