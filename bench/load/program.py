"""What every load generator shares: its command line, its event loop, its one line of output."""

import argparse
import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import uvloop

Report = dict[str, float]


def arguments(description: str | None, **defaults: float | str) -> argparse.Namespace:
    """Parse `--url` and one option for each default, of the default's type."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", required=True, help="http://host:port of the server")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def run(load: Coroutine[Any, Any, Report]) -> None:
    """Run the load to its end and print its report."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(load)), flush=True)


def websocket_url(url: str) -> str:
    return url.replace("http://", "ws://", 1) + "/ws"
