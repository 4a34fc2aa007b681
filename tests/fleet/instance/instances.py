"""Real instance processes, and environments for them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paddock.env import ToolEnvironment, tool
from wire import Answer, Http

KEY = "the-key"
TOKEN = "the-token"
MANAGER = "/notes/api/v1/env"
SECONDS = 20.0
HERE = f"{__file__}:"
"""Before the name of a class below, this is a target."""


class Loud(ToolEnvironment):
    """Prints, fails, and says what it finds in its environment variables."""

    def __init__(self) -> None:
        super().__init__()
        print("a line that nobody waits for", flush=True)

    @tool
    def variable(self, name: str) -> str:
        return os.environ.get(name, "none")

    @tool
    def fail(self) -> str:
        raise RuntimeError("it broke")

    @tool
    async def later(self) -> str:
        return "later"


class Unbuilt(ToolEnvironment):
    def __init__(self) -> None:
        raise RuntimeError("no room")


class Instance:
    """A running process of one instance."""

    def __init__(self, place: Path, **spec: Any) -> None:
        self.log = place / "log"
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paddock.fleet.instance"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environment, **spec.pop("process_environment", {})},
            )
        usual = {"instance_id": "i-1", "env_key": "notes", "target": "notes", "version": "v0.0.2", "image_type": None}
        self.spec = {**usual, "folder": str(place), "host": "127.0.0.1", **spec}
        self.port = 0

    def begin(self) -> dict[str, Any]:
        """Give the spec; what the process answers."""
        self.tell(self.spec)
        assert self.process.stdout is not None
        output: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.port = output.get("port", 0)
        return output

    def tell(self, document: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(document).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        http = Http(self.port)
        try:
            return http(method, path, body, **headers)
        finally:
            http.close()

    def post(self, path: str, body: Any = None, **headers: str) -> Any:
        return self.ask("POST", path, {} if body is None else body, **headers).json

    def rpc(self, method: str, params: Any = None, path: str = "/mcp", **headers: str) -> Any:
        call = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params or {}}
        return self.post(path, call, **headers)

    def call(self, tool: str, *, path: str = "/mcp", key: str | None = None, **arguments: Any) -> Any:
        meta = {} if key is None else {"_meta": {"paddock/idempotency-key": key}}
        return self.rpc("tools/call", {"name": tool, "arguments": arguments, **meta}, path)

    def titles(self) -> list[str]:
        notes = self.call("list_notes")["result"]["structuredContent"]["result"]
        return [note["title"] for note in notes]

    def end(self) -> int:
        """Close its input, and wait for it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.process.stdout.close()


@contextmanager
def running(place: Path, **spec: Any) -> Iterator[Instance]:
    instance = Instance(place, **spec)
    try:
        reply = instance.begin()
        assert "port" in reply, reply
        yield instance
    finally:
        instance.end()
