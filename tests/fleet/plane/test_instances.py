"""The life of an instance as clients see it: made, kept alive, ended once."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from running import wait_until
from wire import Http

from .running_plane import RunningPlane, StartPlane, asked_of, is_gone

INSTANCES = "/v1/env/instances"


# -- made ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_an_instance_works_when_its_making_is_answered(start_plane: StartPlane, loop: str) -> None:
    plane = start_plane(loop=loop)
    made = plane.make(
        env_version="v2", env_variables={"COLOR": "red"}, data_key="d", data_version="v3", image_type="mcp"
    )
    reply = asked_of(made["urls"]["root"])
    assert (made["status"], made["health"], made["version"]) == ("running", True, "v2")
    assert reply["instance_id"] == made["instance_id"]
    assert (reply["target"], reply["version"], reply["image_type"]) == ("serve", "v2", "mcp")
    assert (reply["env_variables"], reply["data_key"], reply["data_version"]) == ({"COLOR": "red"}, "d", "v3")
    assert plane("DELETE", f"{INSTANCES}/{made['instance_id']}").json["status"] == "stopped"


def test_the_addresses_have_the_shape_that_clients_build_on(plane: RunningPlane) -> None:
    urls = plane.make()["urls"]
    root = urls["root"]
    assert root.endswith("/")
    assert urls["app"] == [root]
    assert urls["manager"]["api"] == f"{root}serve/api/v1/env"
    assert len(urls["manager"]) == 7
    assert all(isinstance(url, str) for url in urls["manager"].values())


def test_every_instance_has_an_origin_of_its_own(plane: RunningPlane) -> None:
    assert plane.make()["urls"]["root"] != plane.make()["urls"]["root"]


def test_all_required_fields_are_strings(plane: RunningPlane) -> None:
    required = ("instance_id", "env_key", "version", "status", "subdomain", "created_at", "updated_at")
    made = plane.make()
    assert all(isinstance(made[name], str) for name in (*required, "team_id", "region"))


def test_the_version_is_the_default_unless_it_is_named(plane: RunningPlane) -> None:
    assert plane.make()["version"] == "v1"
    assert plane.make(env_version="2")["version"] == "v2"
    assert plane.make("serve:v2")["version"] == "v2"


def test_an_environment_that_cannot_be_loaded_is_a_final_error(plane: RunningPlane) -> None:
    answer = plane("POST", INSTANCES, {"env_key": "refuse"})
    assert (answer.status, answer.headers["retry-after"]) == (400, None)
    assert "no module named 'nowhere'" in answer.json["detail"]
    assert plane.get(INSTANCES)[0]["status"] == "error"


def test_a_process_that_dies_may_be_tried_again(plane: RunningPlane) -> None:
    answer = plane("POST", INSTANCES, {"env_key": "die"})
    assert (answer.status, answer.headers["retry-after"], answer.json["retryable"]) == (400, "1", True)
    assert "the sky is falling" in answer.json["detail"]
    assert '"retryable": true' in answer.json["detail"]


def test_max_wait_is_kept_and_nothing_is_left(plane: RunningPlane) -> None:
    began = time.monotonic()
    answer = plane("POST", INSTANCES, {"env_key": "hang", "max_wait_seconds": 1})
    assert 1 <= time.monotonic() - began < 3
    assert answer.status == 400
    assert answer.json["retryable"]
    assert plane.get(INSTANCES)[0]["status"] == "error"
    assert plane.get("/v1/account")["instance_count"] == 0


def test_a_request_that_comes_again_gets_no_second_instance(plane: RunningPlane) -> None:
    made = plane.post(INSTANCES, {"env_key": "serve"}, X_Request_ID="one")
    status, detail = plane.refusal("POST", INSTANCES, {"env_key": "serve"}, X_Request_ID="one")
    assert (status, detail["error"], detail["instance_id"]) == (409, "duplicate_request_id", made["instance_id"])
    assert isinstance(detail["message"], str)
    assert len(plane.get(INSTANCES)) == 1


def test_a_request_that_comes_again_is_known_while_the_first_is_pending(plane: RunningPlane) -> None:
    order = {"env_key": "slow-0.5"}
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(plane.post, INSTANCES, order, X_Request_ID="one")
        wait_until(lambda: plane.get(INSTANCES))
        status, detail = plane.refusal("POST", INSTANCES, order, X_Request_ID="one")
        assert (status, plane.status(detail["instance_id"])) == (409, "pending")
        assert first.result()["instance_id"] == detail["instance_id"]


def test_a_client_that_left_finds_its_instance(plane: RunningPlane) -> None:
    client = Http(plane.port, 0.1)
    with pytest.raises(TimeoutError):
        client("POST", INSTANCES, {"env_key": "slow-0.5"}, Authorization="Bearer the-key", X_Request_ID="one")
    client.close()
    _, detail = plane.refusal("POST", INSTANCES, {"env_key": "slow-0.5"}, X_Request_ID="one")
    assert plane.wait_for(detail["instance_id"], "running")["urls"]


def test_the_limit_holds_for_parallel_creates(start_plane: StartPlane) -> None:
    plane = start_plane(instance_limit=3)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: plane("POST", INSTANCES, {"env_key": "serve"}), range(8)))
    refused = [answer.json["detail"] for answer in answers if answer.status == 403]
    assert sorted(answer.status for answer in answers) == [200] * 3 + [403] * 5
    assert refused[0]["error_type"] == "instance_limit_exceeded"
    assert (refused[0]["running_instances"], refused[0]["instance_limit"]) == (3, 3)
    assert "instance limit" in refused[0]["message"].lower()


def test_what_has_ended_does_not_count(start_plane: StartPlane) -> None:
    plane = start_plane(instance_limit=1)
    for _ in range(2):
        made = plane.make()
        assert plane.get("/v1/account")["instance_count"] == 1
        plane("DELETE", f"{INSTANCES}/{made['instance_id']}")
        plane.refusal("POST", INSTANCES, {"env_key": "refuse"})
    assert plane.get("/v1/account")["instance_count"] == 0


# -- looked at ----------------------------------------------------------------------------------------


def test_instances_are_found_by_status_region_and_run(start_plane: StartPlane) -> None:
    plane = start_plane(regions=("here", "there"))
    first, second = plane.make(run_id="a"), plane.make(run_id="b", region="there")
    plane("DELETE", f"{INSTANCES}/{first['instance_id']}")

    def found(query: str) -> list[str]:
        return [instance["instance_id"] for instance in plane.get(f"{INSTANCES}?{query}")]

    assert found("status=stopped") == [first["instance_id"]]
    assert found("region=there") == found("run_id=b") == found("status=running") == [second["instance_id"]]
    assert found("run_id=b&status=stopped") == found("profile_id=stranger") == []
    assert len(found("profile_id=local")) == 2


def test_an_ended_instance_can_be_looked_at_but_has_no_address(plane: RunningPlane) -> None:
    made = plane.make()
    plane("DELETE", f"{INSTANCES}/{made['instance_id']}")
    response = plane.get(f"{INSTANCES}/{made['instance_id']}")
    assert (response["status"], response["urls"]) == ("stopped", None)
    assert response["terminated_at"]


def test_an_unknown_instance_is_not_found(plane: RunningPlane) -> None:
    for method, path in [("GET", "x"), ("DELETE", "x"), ("POST", "x/heartbeat")]:
        assert plane.refusal(method, f"{INSTANCES}/{path}") == (404, "Instance 'x' not found.")


def test_runs_are_counted(plane: RunningPlane) -> None:
    made = [plane.make(run_id="a"), plane.make(run_id="a"), plane.make(run_id="b")]
    plane.make()
    plane("DELETE", f"{INSTANCES}/{made[0]['instance_id']}")
    plane("DELETE", f"{INSTANCES}/{made[2]['instance_id']}")

    def counts(active: str) -> dict[str, tuple[int, int]]:
        runs = plane.get(f"/v1/env/runs?active={active}")
        return {run["run_id"]: (run["running_count"], run["total_count"]) for run in runs}

    assert counts("active") == {"a": (1, 2)}
    assert counts("inactive") == {"b": (0, 1)}
    assert counts("all") == {"a": (1, 2), "b": (0, 1)}


# -- ended --------------------------------------------------------------------------------------------


def test_a_deleted_instance_leaves_no_process_and_no_folder(plane: RunningPlane) -> None:
    made = plane.make("parent")
    folder = plane.plane.instances.folder_of(made["instance_id"])
    pid, child = plane.pid(made["instance_id"]), int((folder / "child").read_text())
    plane("DELETE", f"{INSTANCES}/{made['instance_id']}")
    assert is_gone(pid)
    wait_until(lambda: is_gone(child))
    assert not folder.exists()


def test_an_instance_that_will_not_end_is_killed(start_plane: StartPlane) -> None:
    plane = start_plane(end_seconds=0.2)
    made = plane.make("stubborn")["instance_id"]
    pid = plane.pid(made)
    assert plane("DELETE", f"{INSTANCES}/{made}").json["status"] == "stopped"
    assert is_gone(pid)


def test_to_delete_twice_is_a_bad_request_unless_it_is_the_same_request(plane: RunningPlane) -> None:
    path = f"{INSTANCES}/{plane.make()['instance_id']}"
    assert plane("DELETE", path, X_Request_ID="one").status == 200
    assert plane("DELETE", path, X_Request_ID="one").json["status"] == "stopped"
    status, detail = plane.refusal("DELETE", path, X_Request_ID="two")
    assert status == 400
    assert "Instance already terminated" in detail


def test_of_two_parallel_deletes_one_succeeds(plane: RunningPlane) -> None:
    path = f"{INSTANCES}/{plane.make()['instance_id']}"
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda _: plane("DELETE", path).status, range(2)))
    assert sorted(answers) == [200, 400]


def test_a_pending_instance_can_be_deleted(plane: RunningPlane) -> None:
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(plane, "POST", INSTANCES, {"env_key": "hang"})
        wait_until(lambda: plane.get(INSTANCES))
        pending = plane.get(INSTANCES)[0]
        assert plane("DELETE", f"{INSTANCES}/{pending['instance_id']}").json["status"] == "stopped"
        answer = making.result()
    assert answer.status == 400
    assert "it was deleted" in answer.json["detail"]


def test_a_run_is_deleted_at_once(plane: RunningPlane) -> None:
    mine = [plane.make(run_id="a")["instance_id"] for _ in range(3)]
    other = plane.make(run_id="b")["instance_id"]
    ended = plane("DELETE", f"{INSTANCES}/batch?run_id=a").json
    assert {instance["instance_id"] for instance in ended} == set(mine)
    assert {instance["status"] for instance in ended} == {"stopped"}
    assert plane.status(other) == "running"
    assert plane("DELETE", f"{INSTANCES}/batch?profile_id=stranger").json == []
    assert len(plane("DELETE", f"{INSTANCES}/batch?profile_id=local").json) == 1
    assert plane.refusal("DELETE", f"{INSTANCES}/batch")[0] == 400


def test_time_to_live_and_heartbeats_end_an_instance(plane: RunningPlane) -> None:
    short = plane.make(ttl_seconds=1)["instance_id"]
    # The one that beats is the older: it would be the first to end.
    beating = plane.make(heartbeat_interval=1)["instance_id"]
    silent = plane.make(heartbeat_interval=1)["instance_id"]
    beats = []

    def beat() -> bool:
        beats.append(plane.post(f"{INSTANCES}/{beating}/heartbeat", {}))
        return plane.status(silent) == "stopped" and plane.status(short) == "stopped"

    wait_until(beat)
    assert "time to live" in plane.get(f"{INSTANCES}/{short}")["reason"]
    assert "heartbeat" in plane.get(f"{INSTANCES}/{silent}")["reason"]
    assert (plane.status(beating), beats[-1]["interval_seconds"]) == ("running", 1)
    assert 0 < beats[-1]["deadline_timestamp"] - time.time() <= 1
    status, detail = plane.refusal("POST", f"{INSTANCES}/{short}/heartbeat", {})
    assert (status, "is stopped" in detail) == (400, True)


def test_time_to_live_counts_from_the_request(plane: RunningPlane) -> None:
    status, detail = plane.refusal("POST", INSTANCES, {"env_key": "hang", "ttl_seconds": 1})
    assert status == 400
    assert "time to live" in detail
    assert plane.get(INSTANCES)[0]["status"] == "stopped"


def test_an_unneeded_heartbeat_is_accepted(plane: RunningPlane) -> None:
    made = plane.make()["instance_id"]
    beaten = plane.post(f"{INSTANCES}/{made}/heartbeat", {"region": "moon"})
    assert beaten == {
        "success": True,
        "instance_id": made,
        "last_heartbeat": None,
        "deadline_timestamp": None,
        "interval_seconds": None,
    }
    assert plane.get(f"{INSTANCES}/{made}")["heartbeat_region"] == "moon"


def test_a_process_that_dies_is_an_error(plane: RunningPlane) -> None:
    made = plane.make()["instance_id"]
    os.kill(plane.pid(made), signal.SIGKILL)
    assert "ended with code -9" in plane.wait_for(made, "error")["reason"]
    assert plane.get("/v1/account")["instance_count"] == 0


# -- the gate -----------------------------------------------------------------------------------------


def test_a_gated_plane_returns_its_token_with_the_key(start_plane: StartPlane) -> None:
    plane = start_plane(gate=True)
    token = plane.get("/v1/runner-auth/token")["token"]
    reply = asked_of(plane.make()["urls"]["root"])
    assert (reply["runner_token"], reply["api_key"]) == (token, "the-key")
    assert plane("GET", "/v1/runner-auth/token", Authorization="").status == 401


def test_without_a_gate_there_is_no_token(plane: RunningPlane) -> None:
    assert plane.refusal("GET", "/v1/runner-auth/token")[0] == 404
    reply = asked_of(plane.make()["urls"]["root"])
    assert (reply["runner_token"], reply["api_key"]) == (None, None)
