"""Faults on demand: what goes wrong is exactly what was asked for."""

import http.client
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from running import wait_until
from wire import Http

from .running_plane import KEY, RunningPlane, StartPlane

INSTANCES = "/v1/env/instances"


@pytest.fixture
def plane(start_plane: StartPlane) -> RunningPlane:
    return start_plane(faults=True)


def inject(plane: RunningPlane, **fault: Any) -> Any:
    return plane.post("/_lab/faults", fault)


def test_a_status_is_answered_so_many_times(plane: RunningPlane) -> None:
    inject(
        plane, path="^/v1/account$", method="get", status=502, times=2, headers={"Retry-After": "7"}, body={"a": 1}
    )
    answers = [plane("GET", "/v1/account") for _ in range(3)]
    assert [answer.status for answer in answers] == [502, 502, 200]
    assert (answers[0].headers["retry-after"], answers[0].json) == ("7", {"a": 1})
    assert plane.get("/_lab/faults")[0]["hits"] == 2


def test_a_fault_may_last_until_it_is_cleared(plane: RunningPlane) -> None:
    inject(plane, path="account", status=500, times=-1)
    assert {plane("GET", "/v1/account").status for _ in range(5)} == {500}
    assert plane("GET", "/v1/regions").status == 200
    assert plane("DELETE", "/_lab/faults").json == []
    assert plane("GET", "/v1/account").status == 200


def test_the_work_is_done_and_its_answer_lost(plane: RunningPlane) -> None:
    inject(plane, path="instances$", method="POST", status=503, after=True)
    assert plane("POST", INSTANCES, {"env_key": "serve"}, X_Request_ID="one").status == 503
    made = plane.get(INSTANCES)
    assert [instance["status"] for instance in made] == ["running"]
    assert plane.refusal("POST", INSTANCES, {"env_key": "serve"}, X_Request_ID="one")[0] == 409


@pytest.mark.parametrize("after", [False, True])
def test_a_connection_is_dropped_without_a_byte(plane: RunningPlane, after: bool) -> None:
    inject(plane, path="jobs", method="POST", drop=True, after=after)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        plane("POST", "/v1/jobs", {"models": ["m"]})
    assert plane.get("/v1/jobs")["total"] == after


def test_a_response_may_never_come(plane: RunningPlane) -> None:
    inject(plane, path="account", hang=True)
    client = Http(plane.port, 0.2)
    with pytest.raises(TimeoutError):
        client("GET", "/v1/account", Authorization=f"Bearer {KEY}")
    client.close()
    assert plane("GET", "/v1/account").status == 200


def test_a_response_may_be_late_or_byte_by_byte(plane: RunningPlane) -> None:
    inject(plane, path="account", delay=0.2)
    inject(plane, path="regions", dribble=0.02)
    for path, least in (("/v1/account", 0.2), ("/v1/regions", 0.15)):
        began = time.monotonic()
        assert plane("GET", path).status == 200
        assert time.monotonic() - began >= least
    assert plane("GET", "/v1/regions").json == ["local"]


def test_faults_reach_present_and_future_instances(plane: RunningPlane) -> None:
    def told(instance_id: str) -> list[Any]:
        lines = Path(plane.plane.instances.folder_of(instance_id) / "lines")
        return [orjson.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []

    first = plane.make()["instance_id"]
    fault = inject(plane, path=f"/{first}/mcp", drop=True)[0]
    wait_until(lambda: told(first))
    assert told(first) == [{"faults": [fault]}]
    second = plane.make()["instance_id"]
    wait_until(lambda: told(second))
    assert told(second) == told(first)
    plane("DELETE", "/_lab/faults")
    wait_until(lambda: told(first)[-1] == {"faults": []})


@pytest.mark.parametrize("fault", [{}, [1], {"path": "("}, {"path": "x", "stauts": 1}, {"path": "x", "times": "1"}])
def test_an_invalid_fault_is_refused(plane: RunningPlane, fault: Any) -> None:
    assert plane.refusal("POST", "/_lab/faults", fault)[0] == 400


def test_the_fault_routes_require_the_key(plane: RunningPlane) -> None:
    assert plane("POST", "/_lab/faults", {"path": "x"}, Authorization="").status == 401
