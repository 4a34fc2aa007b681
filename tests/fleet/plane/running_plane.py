"""A real plane in a thread, with stand-ins for its instances."""

import asyncio
import json
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddock.fleet.plane import HostedEnvironment, PlaneSettings, create_plane
from paddock.fleet.plane.app import PlaneServer
from paddock.server.listening import bind, loop_factory
from running import wait_until
from wire import Answer, Http

KEY = "the-key"
STANDIN = (sys.executable, "-I", "-S", str(Path(__file__).with_name("standin.py")))
BEHAVIOURS = ("serve", "refuse", "die", "hang", "slow-0.5", "parent", "once", "stubborn")


def plane_settings(state: Path, **changes: Any) -> PlaneSettings:
    hosted = tuple(HostedEnvironment(name, name, ("v1", "v2"), "v1") for name in BEHAVIOURS)
    usual: dict[str, Any] = {
        "state": state,
        "environments": hosted,
        "api_key": KEY,
        "warm": 0,
        "end_seconds": 1.0,
        "instance_command": STANDIN,
    }
    return PlaneSettings(**{**usual, **changes})


class RunningPlane:
    def __init__(self, settings: PlaneSettings, verify: Any = None, loop: str = "uvloop") -> None:
        self.app = create_plane(settings, verify=verify)
        self.plane = self.app.state.plane
        self.listening = bind("127.0.0.1", 0)
        self.port: int = self.listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = PlaneServer(self.app, lambda: None)
        self.factory = loop_factory() if loop == "uvloop" else None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started or not self.thread.is_alive())
        assert self.server.started

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self.factory) as runner:
            self.loop = runner.get_loop()
            runner.run(self.server.serve(sockets=[self.listening]))

    def __call__(self, method: str, path: str, document: Any = None, **headers: str) -> Answer:
        client = Http(self.port, 50)
        try:
            return client(method, path, document, **{"Authorization": f"Bearer {KEY}", **headers})
        finally:
            client.close()

    def get(self, path: str) -> Any:
        answer = self("GET", path)
        assert answer.status == 200, answer.body
        return answer.json

    def post(self, path: str, document: Any, **headers: str) -> Any:
        answer = self("POST", path, document, **headers)
        assert answer.status == 200, answer.body
        return answer.json

    def make(self, env_key: str = "serve", **fields: Any) -> Any:
        return self.post("/v1/env/instances", {"env_key": env_key, **fields})

    def status(self, instance_id: str) -> str:
        result: str = self.get(f"/v1/env/instances/{instance_id}")["status"]
        return result

    def wait_for(self, instance_id: str, status: str, seconds: float = 5) -> Any:
        wait_until(lambda: self.status(instance_id) == status, seconds)
        return self.get(f"/v1/env/instances/{instance_id}")

    def refusal(self, method: str, path: str, document: Any = None, **headers: str) -> tuple[int, Any]:
        answer = self(method, path, document, **headers)
        assert answer.status >= 400, answer.body
        return answer.status, answer.json["detail"]

    def pid(self, instance_id: str) -> int:
        return int(self.plane.instances._live[instance_id].process.pid)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        self.listening.close()
        assert not self.thread.is_alive()


def asked_of(url: str) -> Any:
    """What a stand-in says it was told to be."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.loads(answer.read())


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


StartPlane = Callable[..., RunningPlane]
