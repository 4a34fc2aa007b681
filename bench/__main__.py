"""The command line: `python -m bench [MEASURE ...]` prints a table of ratios."""

import argparse
import json
import os
import platform
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from scripts.peers import peer_python

from bench.measures import MEASURES, QUICK, Settings
from bench.results import Row, table
from bench.samples import note


def main() -> int:
    """Run the measures and return 1 if one of them could not be taken."""
    # Where this is set, a peer's workers compile for longer than uvicorn waits for them, again and again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    parser = _parser()
    options = parser.parse_args()
    for name in options.measures:
        if name not in MEASURES:
            parser.error(f"no measure is called {name!r}; there are {', '.join(MEASURES)}")
    settings = _settings(options)
    _raise_file_limit()
    # Servers live in process groups of their own: leave by an exception, which ends them.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    peer_python("openenv")
    rows: list[Row] = []
    failures = 0
    for name in options.measures or MEASURES:
        note(f"{name}: {MEASURES[name].__doc__}")
        try:
            rows += MEASURES[name](settings)
        except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
            failures += 1
            note(f"error: {name} was not measured: {error}")
    if options.json:
        _write_json(options.json, settings, rows)
    print(table(rows))
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "measures",
        nargs="*",
        metavar="MEASURE",
        help=f"what to measure, of {', '.join(MEASURES)}; everything if none is named",
    )
    parser.add_argument("--seconds", type=float, help="length of one sample")
    parser.add_argument("--rounds", type=int, help="samples of each server")
    parser.add_argument("--quick", action="store_true", help="one short round, not to be quoted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to a file")
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    settings = QUICK if options.quick else Settings()
    if options.seconds is not None:
        settings = replace(settings, seconds=options.seconds)
    if options.rounds is not None:
        settings = replace(settings, rounds=options.rounds)
    return settings


def _raise_file_limit() -> None:
    """Let this process and its children hold as many sockets as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _write_json(path: Path, settings: Settings, rows: list[Row]) -> None:
    document = {
        "python": sys.version.split()[0],
        "machine": platform.platform(),
        "settings": asdict(settings),
        "rows": [row.as_json() for row in rows],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
