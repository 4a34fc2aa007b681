"""A plane as a person starts it: `paddock fleet up` in a process of its own, and tasks for its notes."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddock.fleet.client.settings import PlaneAddress

STARTUP_SECONDS = 40
SHUTDOWN_SECONDS = 15

HAS_NOTE = """
def helper(rows, title):
    return [row for row in rows if row["title"] == title]

def verify(env, final_answer=None):
    rows = env.db("current").table("notes").all()
    print("rows:", len(rows))
    return 1.0 if len(helper(rows, {title!r})) == 1 else 0.0
"""


@dataclass(frozen=True, slots=True)
class PlaneProcess:
    address: PlaneAddress
    state: Path
    pid: int

    def instances(self, **filters: str) -> list[dict[str, Any]]:
        """All that the plane remembers."""
        query = "&".join(f"{name}={value}" for name, value in filters.items())
        response: list[dict[str, Any]] = self.ask("GET", f"/v1/env/instances?{query}")
        return response

    def alive(self, **filters: str) -> list[str]:
        result = self.instances(**filters)
        return [each["instance_id"] for each in result if each["status"] in ("pending", "running")]

    def ask(self, method: str, path: str, document: Any = None) -> Any:
        body = None if document is None else json.dumps(document).encode()
        url = f"{self.address.base_url}{path}"
        request = urllib.request.Request(url, body, {**self.address.headers}, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())


@contextmanager
def plane_process(folder: Path, *options: str, ends_with: int = 0) -> Iterator[PlaneProcess]:
    """Up from its first word to its SIGTERM; it must end with that code."""
    state = folder / "plane"
    up = [sys.executable, "-m", "paddock", "fleet", "up", "--port", "0", "--state", str(state), "--json"]
    with (folder / "plane.log").open("wb") as log:
        process = subprocess.Popen([*up, *options], stdout=subprocess.PIPE, stderr=log, env=plain_environment())
    assert process.stdout is not None
    try:
        output = process.stdout.readline()
        if not output:
            raise RuntimeError(f"the plane ended with {process.wait(5)}: {(folder / 'plane.log').read_text()}")
        url = json.loads(output)["url"]
        key = (state / "api_key").read_text()
        yield PlaneProcess(PlaneAddress(url, key), state, process.pid)
    finally:
        process.stdout.close()
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    assert code == ends_with, (folder / "plane.log").read_text()


def plain_environment(**changes: str) -> dict[str, str]:
    """Ours, without what would name another plane, another store or a proxy."""
    foreign = ("FLEET_", "PADDOCK_")
    remaining = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {name: value for name, value in remaining.items() if not name.lower().endswith("_proxy")} | changes


def note_task(title: str, **changes: Any) -> dict[str, Any]:
    verifier = HAS_NOTE.replace("{title!r}", repr(title))
    prompt = f"Add a note called {title}."
    return {"task_key": f"note-{title}", "prompt": prompt, "env_key": "notes", "verifier_code": verifier, **changes}


def adds(title: str) -> dict[str, Any]:
    return {"tool": "add_note", "arguments": {"title": title}}


def played(*titles: str, **options: Any) -> dict[str, Any]:
    """A model that adds the right note for each title, and looks at it."""
    tasks = [
        {"when": f"called {title}.", "turns": [adds(title), {"tool": "list_notes"}, {"text": "Done."}]}
        for title in titles
    ]
    return {"tasks": tasks, **options}
