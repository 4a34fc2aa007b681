"""A plane that is stopped or killed leaves no process, and the next one knows what there was."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paddock.errors import ConfigError
from paddock.fleet.plane import create_plane
from paddock.fleet.plane.plane import Plane
from running import wait_until
from wire import Http

from .running_plane import KEY, StartPlane, is_gone, plane_settings

INSTANCES = "/v1/env/instances"
TESTS = Path(__file__).parents[2]
Ask = Callable[..., Any]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Ask]]:
    """A plane in a process, and how to ask it."""
    command = [sys.executable, "-m", "fleet.plane.served_plane", tmp_path / "state"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=TESTS)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    client = Http(port)
    yield process, lambda *request: client(*request, Authorization=f"Bearer {KEY}").json
    client.close()
    process.kill()
    process.wait()
    process.stdout.close()


def children(pid: int) -> list[int]:
    result = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in result]


def test_a_killed_plane_leaves_no_process_and_the_next_marks_its_instances(
    served: tuple[subprocess.Popen[bytes], Ask], start_plane: StartPlane
) -> None:
    process, ask = served
    made = [ask("POST", INSTANCES, {"env_key": "serve", "run_id": "r"}) for _ in range(2)]
    ask("POST", "/v1/tasks", {"key": "t", "prompt": "p", "env_id": "serve", "verifier_func": "def verify(env): ..."})
    wait_until(lambda: len(children(process.pid)) == 3)
    pids = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: all(map(is_gone, pids)))

    plane = start_plane(instance_limit=2)
    assert {plane.status(instance["instance_id"]) for instance in made} == {"stopped"}
    assert "plane" in plane.get(f"{INSTANCES}/{made[0]['instance_id']}")["reason"]
    assert plane.get("/v1/account")["instance_count"] == 0
    assert plane.get("/v1/env/runs?active=inactive")[0]["total_count"] == 2
    assert plane.get("/v1/tasks/t")["verifier"]["version"] == 1
    assert [plane.make()["status"], plane.make()["status"]] == ["running", "running"]


def test_what_does_not_end_with_its_plane_is_ended_by_the_next(
    served: tuple[subprocess.Popen[bytes], Ask], start_plane: StartPlane
) -> None:
    process, ask = served
    ask("POST", INSTANCES, {"env_key": "stubborn"})
    pids = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not all(map(is_gone, pids))
    start_plane()
    wait_until(lambda: all(map(is_gone, pids)))


def test_a_plane_that_is_stopping_says_so(start_plane: StartPlane) -> None:
    plane = start_plane()
    assert plane.loop is not None
    asyncio.run_coroutine_threadsafe(plane.plane.stop(), plane.loop).result(5)
    for method, path in [("POST", INSTANCES), ("GET", INSTANCES), ("GET", "/v1/tasks")]:
        answer = plane(method, path, {"env_key": "serve"})
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")


def test_a_stopped_plane_ends_its_instances_and_exits_well(served: tuple[subprocess.Popen[bytes], Ask]) -> None:
    process, ask = served
    ask("POST", INSTANCES, {"env_key": "parent"})
    pids = children(process.pid)
    grandchildren = [each for pid in pids for each in children(pid)]
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert grandchildren
    wait_until(lambda: all(map(is_gone, [*pids, *grandchildren])))


def test_a_plane_that_is_stopped_says_why_its_instances_ended(start_plane: StartPlane) -> None:
    first = start_plane()
    made = first.make()["instance_id"]
    first.stop()
    result = start_plane().get(f"{INSTANCES}/{made}")
    assert (result["status"], result["reason"]) == ("stopped", "the plane was stopped")


def test_a_repeated_request_is_known_to_the_next_plane(start_plane: StartPlane) -> None:
    first = start_plane()
    made = first.post(INSTANCES, {"env_key": "serve"}, X_Request_ID="one")
    first.stop()
    status, detail = start_plane().refusal("POST", INSTANCES, {"env_key": "serve"}, X_Request_ID="one")
    assert (status, detail["instance_id"]) == (409, made["instance_id"])


def test_two_planes_do_not_share_a_folder(start_plane: StartPlane, tmp_path: Path) -> None:
    start_plane()
    with pytest.raises(ConfigError, match="another plane"):
        Plane(plane_settings(tmp_path / "state")).open()


def test_a_created_key_is_kept_and_private(tmp_path: Path) -> None:
    settings = plane_settings(tmp_path / "state", api_key=None)
    key = create_plane(settings).state.plane.api_key
    assert len(key) > 20
    assert create_plane(settings).state.plane.api_key == key
    assert (tmp_path / "state" / "api_key").stat().st_mode & 0o077 == 0
    assert key not in repr(settings)
