"""The HTTP routes: episodes, errors, tasks, what the server says about itself."""

import asyncio
import json
import sqlite3
import threading
import time
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from environments import Add, Adder, Alone, AsyncScripted, Did, Kit, Script, Scripted, SlowToBuild, Watched
from paddock import Action, Environment, Observation, State, create_app
from paddock.envs.counter import Counter
from paddock.errors import ConfigError
from running import Serve, wait_until

MIB = 1024 * 1024
SLOW = 1.2


# -- episodes -------------------------------------------------------------------------------------


def test_an_episode_by_its_header(serve_fast: Serve) -> None:
    http = serve_fast(Counter).http()
    begun = http("POST", "/reset", {"episode_id": "mine"})
    assert begun.json == {
        "observation": {"total": 0, "metadata": {}}, "reward": None, "done": False, "metadata": None
    }  # fmt: skip
    token = begun.headers["Session-Id"]
    assert http("POST", "/step", {"action": {"amount": 3}}, session_id=token).json["observation"]["total"] == 3
    stepped = http("POST", "/step", {"action": {"amount": 7}}, session_id=token)
    assert (stepped.json["reward"], stepped.json["done"]) == (7.0, True)
    assert stepped.headers["Session-Id"] == token
    assert http("GET", "/state", session_id=token).json == {"episode_id": "mine", "step_count": 2, "total": 10}


def test_an_episode_by_its_cookie(serve_fast: Serve) -> None:
    http = serve_fast(Adder).http()
    response = http("POST", "/reset").headers["Set-Cookie"]
    cookie = response.partition(";")[0]
    assert "httponly" in response.lower()
    http("POST", "/step", {"action": {"amount": 3}}, cookie=cookie)
    assert http("GET", "/state", cookie=cookie).json["total"] == 3


def test_without_either_calls_are_independent(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(Adder)
    http = server.http()
    assert http("POST", "/step", {"action": {"amount": 3}}).json["observation"]["total"] == 3
    assert http("POST", "/step", {"action": {"amount": 4}}).json["observation"]["total"] == 4
    assert http("GET", "/state").json["total"] == 0
    assert server.health()["sessions"] == 0
    wait_until(lambda: all(life.closes for life in lives))


def test_reset_goes_on_in_the_same_session(serve_fast: Serve, lives: list[Watched]) -> None:
    http = serve_fast(Adder).http()
    token = http("POST", "/reset").headers["Session-Id"]
    http("POST", "/step", {"action": {"amount": 3}}, session_id=token)
    again = http("POST", "/reset", {"seed": 1}, session_id=token)
    assert again.json["observation"]["total"] == 1
    assert len(lives) == 1


def test_two_episodes_share_nothing(serve_fast: Serve) -> None:
    http = serve_fast(Adder).http()
    first, second = (http("POST", "/reset").headers["Session-Id"] for _ in range(2))
    http("POST", "/step", {"action": {"amount": 3}}, session_id=first)
    assert http("GET", "/state", session_id=second).json["total"] == 0


def test_an_unknown_session_is_not_found(serve_fast: Serve) -> None:
    http = serve_fast(Adder).http()
    answer = http("POST", "/step", {"action": {"amount": 1}}, session_id="nope")
    assert answer.status == 404
    assert answer.json["code"] == "SESSION_ERROR"


@pytest.mark.parametrize("how", ["cookie", "session_id"])
def test_a_reset_with_a_stale_session_begins_a_new_one(serve_fast: Serve, how: str) -> None:
    http = serve_fast(Adder).http()
    stale = "00000000-0000-4000-8000-000000000000"
    answer = http("POST", "/reset", {}, **{how: f"paddock_session={stale}" if how == "cookie" else stale})
    assert answer.status == 200
    assert answer.headers["Session-Id"] not in (None, stale)


def test_a_tentative_episode_gives_way(serve_fast: Serve) -> None:
    server = serve_fast(Adder, max_sessions=2)
    http = server.http()
    tokens = [http("POST", "/reset").headers["Session-Id"] for _ in range(2)]
    assert server.socket().step(amount=1)["type"] == "observation"
    assert server.socket().step(amount=1)["type"] == "observation"
    assert http("GET", "/state", session_id=tokens[0]).status == 404


def test_many_resets_never_fill_the_server(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(Adder, max_sessions=2)
    http = server.http()
    for _ in range(20):
        assert http("POST", "/reset").status == 200
    assert server.health()["sessions"] <= 2
    assert server.socket().step(amount=1)["type"] == "observation"


def test_an_episode_that_goes_on_keeps_its_slot(serve_fast: Serve) -> None:
    server = serve_fast(Adder, max_sessions=1)
    http = server.http()
    token = http("POST", "/reset").headers["Session-Id"]
    http("POST", "/step", {"action": {"amount": 1}}, session_id=token)
    assert server.socket().receive()["data"]["code"] == "CAPACITY_REACHED"
    assert http("POST", "/step", {"action": {"amount": 1}}, session_id=token).json["observation"]["total"] == 2


def test_an_episode_that_is_done_gives_way(serve_fast: Serve) -> None:
    server = serve_fast(Adder, max_sessions=1)
    http = server.http()
    token = http("POST", "/reset").headers["Session-Id"]
    assert http("POST", "/step", {"action": {"amount": 10}}, session_id=token).json["done"]
    assert server.socket().step(amount=1)["type"] == "observation"


def test_a_full_server_still_answers_independent_calls(serve_fast: Serve) -> None:
    server = serve_fast(Adder, max_sessions=1)
    server.socket().step(amount=1)
    http = server.http()
    answer = http("POST", "/reset")
    assert answer.status == 200
    assert answer.headers["Session-Id"] is None
    assert http("POST", "/step", {"action": {"amount": 3}}).json["observation"]["total"] == 3


def test_a_reset_waits_for_a_session_if_it_says_how_long(serve_fast: Serve) -> None:
    server = serve_fast(Adder, max_sessions=1)
    first = server.raw()
    first.send('{"type":"step","data":{"amount":1}}')
    first.answer()
    http = server.http()
    assert http("POST", "/reset", queue_timeout="0.1").headers["Session-Id"] is None
    http.connection.request("POST", "/reset", headers={"Queue-Timeout": "20"})
    wait_until(lambda: server.health()["waiting"] == 1)
    first.reset()
    assert http.connection.getresponse().headers["Session-Id"]


def test_a_reset_whose_client_left_opens_no_session(serve_fast: Serve) -> None:
    server = serve_fast(SlowToBuild)
    http = server.http()
    http.connection.request("POST", "/reset")
    wait_until(lambda: server.health()["sessions"] == 1)
    http.close()
    wait_until(lambda: server.health()["sessions"] == 0)


def test_instances_that_may_not_overlap_do_not(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(Alone, max_sessions=1)
    ws = server.raw()
    ws.send('{"type":"step","data":{"amount":1}}')
    ws.answer()
    threads = [
        threading.Thread(target=lambda p=path: _quietly(server, p)) for path in ("/metadata", "/state", "/health")
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert len([life for life in lives if not life.closes]) == 1
    ws.reset()
    for thread in threads:
        thread.join()


def test_a_session_for_one_call_is_not_shared(serve_fast: Serve) -> None:
    http = serve_fast(Alone, max_sessions=1).http()
    for method, path, body in (("POST", "/step", {"action": {"amount": 1}}), ("GET", "/state", None)):
        answer = http(method, path, body)
        assert (answer.status, answer.headers["Session-Id"], answer.headers["Set-Cookie"]) == (200, None, None)
    token = http("POST", "/reset").headers["Session-Id"]
    assert http("POST", "/step", {"action": {"amount": 1}}, session_id=token).headers["Session-Id"] == token


def _quietly(server: Any, path: str) -> None:
    server.http()("GET", path)


def test_an_http_session_can_be_closed_by_its_token(serve_fast: Serve) -> None:
    server = serve_fast(Adder, max_sessions=1)
    http = server.http()
    token = http("POST", "/reset").headers["Session-Id"]
    http("POST", "/step", {"action": {"amount": 1}}, session_id=token)
    assert http.rpc("openenv/session/close", {"session_id": token})["result"]["closed"] is True
    assert server.socket().step(amount=1)["type"] == "observation"


def test_parallel_steps_of_one_episode_do_not_interleave(serve_fast: Serve) -> None:
    server = serve_fast(Adder)
    token = server.http()("POST", "/reset").headers["Session-Id"]
    clients = [server.http() for _ in range(8)]

    def play(client: Any) -> None:
        for _ in range(5):
            client("POST", "/step", {"action": {"amount": 1}}, session_id=token)

    threads = [threading.Thread(target=play, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clients[0]("GET", "/state", session_id=token).json == {"episode_id": None, "step_count": 40, "total": 40}


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "location"),
    [
        ("/reset", {"seed": -1}, ["body", "seed"]),
        ("/reset", {"seed": "x"}, ["body", "seed"]),
        ("/reset", {"episode_id": "x" * 256}, ["body", "episode_id"]),
        ("/reset", [], ["body"]),
        ("/step", None, ["body"]),
        ("/step", {}, ["body", "action"]),
        ("/step", {"action": 5}, ["body", "action"]),
        ("/step", {"action": {"amount": 1}, "timeout_s": 0}, ["body", "timeout_s"]),
        ("/step", {"action": {"amount": 1}, "request_id": 5}, ["body", "request_id"]),
        ("/step", {"action": {"amount": -1}}, ["amount"]),
        ("/step", {"action": {}}, ["amount"]),
        ("/step", {"action": {"amount": 1, "x": 2}}, ["x"]),
        ("/step", 5, ["body"]),
    ],
)
def test_a_wrong_body_is_422_and_names_the_place(serve_fast: Serve, path: str, body: Any, location: Any) -> None:
    answer = serve_fast(Adder).http()("POST", path, body)
    assert answer.status == 422
    (problem,) = answer.json["detail"]
    assert problem["loc"] == location
    assert {"type", "msg", "input"} <= problem.keys()


@pytest.mark.parametrize("body", [b"nope", b"{", b"\xff", b"[" * 100_000, b'{"seed":' + b"9" * 5000 + b"}"])
def test_what_is_not_json_is_422(serve_fast: Serve, body: bytes) -> None:
    http = serve_fast(Adder).http()
    answer = http("POST", "/reset", body)
    assert answer.status == 422
    assert answer.json["detail"][0]["loc"][0] == "body"
    assert http("POST", "/reset").status == 200


class Trade(Action):
    open: float
    close: float
    step: int = 0
    state: str = ""


class Market(Environment[Trade, Observation, State]):
    concurrent_sessions = True

    def reset(self, **_: Any) -> Observation:
        return Observation()

    def step(self, action: Trade) -> Observation:
        return Observation()


def test_a_field_may_be_called_like_a_message(serve_fast: Serve) -> None:
    answer = serve_fast(Market).http()("POST", "/step", {"action": {"open": "x", "close": "y", "step": "z"}})
    assert [problem["loc"] for problem in answer.json["detail"]] == [["open"], ["close"], ["step"]]


def test_a_body_over_the_limit_is_413(serve_fast: Serve) -> None:
    server = serve_fast(Scripted, message_bytes=MIB)
    for path in ("/reset", "/step", "/mcp"):
        answer = server.http()("POST", path, b"x" * (MIB + 1))
        assert answer.status == 413, path
    assert server.http()("POST", "/step", {"action": {"value": "x" * (MIB - 1000)}}).status == 200


def test_a_chunked_body_over_the_limit_is_413(serve_fast: Serve) -> None:
    server = serve_fast(Scripted, message_bytes=MIB)
    connection = server.http().connection
    connection.request(
        "POST", "/step", iter([b"x" * 65536] * 20), encode_chunked=True, headers={"Transfer-Encoding": "chunked"}
    )
    assert connection.getresponse().status == 413


def test_a_20_mb_body_is_taken(serve_fast: Serve) -> None:
    text = "x" * 20 * MIB
    answer = serve_fast(Scripted).http()("POST", "/step", {"action": {"value": text}})
    assert answer.json["observation"]["value"] == text


@pytest.mark.parametrize("name", ["self", "session_id", "func", "request", "cls"])
def test_a_reset_argument_may_have_any_name(serve_fast: Serve, name: str) -> None:
    http = serve_fast(Adder).http()
    assert http("POST", "/reset", {name: 1}).status == 200


def test_further_keys_of_a_step_reach_an_environment_that_takes_them(serve_fast: Serve) -> None:
    class Takes(Scripted):
        def step(self, action: Script, request_id: str | None = None, mood: str = "") -> Did:  # type: ignore[override]
            return Did(value=[request_id, mood])

    body = {"action": {}, "request_id": "r", "mood": "good", "unknown": 1, "self": 2, "action_": 3}
    answer = serve_fast(Takes).http()("POST", "/step", body)
    assert answer.json["observation"]["value"] == ["r", "good"]


# -- failures -------------------------------------------------------------------------------------


def test_an_exception_is_json_and_the_connection_is_kept(serve_fast: Serve, caplog: Any) -> None:
    http = serve_fast(Scripted).http()
    http("POST", "/reset")
    port = http.local_port
    for _ in range(10):
        answer = http("POST", "/step", {"action": {"fail": "cannot open: password=hunter2"}})
        assert answer.status == 500
        assert answer.json["detail"] == "RuntimeError: cannot open: password=***"
        assert answer.json["code"] == "EXECUTION_ERROR"
    assert http("POST", "/reset").status == 200
    assert http.local_port == port
    assert "Traceback" in caplog.text


class Bad(Scripted):
    def step(self, action: Script) -> Any:
        return {
            "object": Did(value=object()),
            "bytes": Did(value=b"\xff"),
            "nothing": None,
            "reward": {"reward": "much", "done": False},
        }[action.value]


@pytest.mark.parametrize("what", ["object", "bytes", "nothing", "reward"])
def test_an_answer_that_cannot_be_written_is_500_as_json(serve_fast: Serve, what: str) -> None:
    http = serve_fast(Bad).http()
    answer = http("POST", "/step", {"action": {"value": what}})
    port = http.local_port
    assert (answer.status, answer.json["code"]) == (500, "EXECUTION_ERROR")
    assert http("POST", "/reset").status == 200
    assert http.local_port == port


def test_a_validator_that_breaks_is_422_and_the_connection_is_kept(serve_fast: Serve) -> None:
    class Fragile(Action):
        place: str

        @field_validator("place")
        @classmethod
        def known(cls, place: str) -> str:
            return {"here": "there"}[place]

    class Places(Environment[Fragile, Observation, State]):
        concurrent_sessions = True

        def reset(self, **_: Any) -> Observation:
            return Observation()

        def step(self, action: Fragile) -> Observation:
            return Observation()

    http = serve_fast(Places).http()
    answer = http("POST", "/step", {"action": {"place": "nowhere"}})
    port = http.local_port
    assert answer.status == 422
    assert http("POST", "/reset").status == 200
    assert http.local_port == port


def test_a_factory_that_fails_is_500_as_json(serve_fast: Serve) -> None:
    class Broken(Adder):
        def __init__(self) -> None:
            raise RuntimeError("no database")

    http = serve_fast(Broken).http()
    for method, path in (("POST", "/reset"), ("GET", "/state"), ("GET", "/metadata")):
        answer = http(method, path)
        assert (answer.status, answer.json["code"]) == (500, "FACTORY_ERROR")


@pytest.mark.parametrize("make", [Scripted, AsyncScripted])
def test_a_step_over_its_deadline_is_504(serve_fast: Serve, lives: list[Watched], make: Any) -> None:
    http = serve_fast(make).http()
    answer = http("POST", "/step", {"action": {"hang": True}, "timeout_s": 0.2})
    assert (answer.status, answer.json["code"]) == (504, "STEP_TIMEOUT")
    for life in lives:
        life.release.set()


def test_a_step_whose_client_left_is_cancelled(serve_fast: Serve, lives: list[Watched]) -> None:
    http = serve_fast(AsyncScripted).http()
    http.connection.request("POST", "/step", json.dumps({"action": {"hang": True}}))
    wait_until(lambda: lives and lives[0].steps)
    http.close()
    wait_until(lambda: lives[0].cancelled == 1 and lives[0].closes == 1)


def test_a_step_without_a_session_is_answered_or_closed_when_the_server_goes(
    serve_fast: Serve, lives: list[Watched]
) -> None:
    server = serve_fast(AsyncScripted, drain_grace=0.2)
    http = server.http()
    http.connection.request("POST", "/step", json.dumps({"action": {"hang": True}}))
    wait_until(lambda: lives and lives[0].steps)
    server.begin_to_stop()
    server.thread.join(5)
    assert lives[0].closes == 1


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/reset", 405), ("POST", "/health", 405), ("GET", "/x", 404)]
)
def test_a_wrong_route_is_json_too(serve_fast: Serve, method: str, path: str, status: int) -> None:
    answer = serve_fast(Adder).http()(method, path)
    assert answer.status == status
    assert "detail" in answer.json


# -- nothing stalls the loop ----------------------------------------------------------------------


class SlowState(Adder):
    @property
    def state(self) -> Any:
        time.sleep(SLOW)
        return State()


class SlowClose(Adder):
    def close(self) -> None:
        time.sleep(SLOW)
        super().close()


class SlowMetadata(Adder):
    def get_metadata(self) -> Any:
        time.sleep(SLOW)
        return super().get_metadata()

    def list_splits(self) -> list[str]:
        time.sleep(SLOW)
        return []


@pytest.mark.parametrize(
    ("make", "method", "path"),
    [
        (SlowToBuild, "POST", "/reset"),
        (SlowToBuild, "GET", "/metadata"),
        (SlowState, "GET", "/state"),
        (SlowClose, "GET", "/state"),
        (SlowMetadata, "GET", "/metadata"),
        (SlowMetadata, "GET", "/slowmetadata/splits"),
    ],
)
def test_health_answers_while_something_slow_runs(serve_fast: Serve, make: Any, method: str, path: str) -> None:
    server = serve_fast(make, drain_grace=4)
    slow = threading.Thread(target=lambda: server.http()(method, path))
    slow.start()
    slowest = 0.0
    for _ in range(5):
        started = time.monotonic()
        server.health()
        slowest = max(slowest, time.monotonic() - started)
        time.sleep(0.05)
    slow.join()
    assert slowest < 0.5


# -- what the server says -------------------------------------------------------------------------


def test_health_has_sessions_and_capacity(serve_fast: Serve) -> None:
    server = serve_fast(Adder, max_sessions=3)
    server.socket().step(amount=1)
    health = server.health()
    assert health["status"] == "healthy"
    assert (health["sessions"], health["capacity"], health["available"]) == (1, 3, 2)
    assert health["can_build"] is True


def test_a_server_that_cannot_build_is_unhealthy(serve_fast: Serve) -> None:
    class Broken(Adder):
        def __init__(self) -> None:
            raise RuntimeError("no database")

    http = serve_fast(Broken).http()

    def is_unhealthy() -> bool:
        answer = http("GET", "/health")
        return (answer.status, answer.json["status"]) == (503, "unhealthy")

    wait_until(is_unhealthy)


def test_a_server_that_can_build_again_is_healthy_again(serve_fast: Serve) -> None:
    class Moody(Adder):
        broken = True

        def __init__(self) -> None:
            if self.broken:
                raise RuntimeError("not now")
            super().__init__()

    server = serve_fast(Moody)
    wait_until(lambda: server.health()["status"] == "unhealthy")
    Moody.broken = False
    server.socket().step(amount=1)
    assert server.health()["status"] == "healthy"


def test_a_full_server_is_healthy(serve_fast: Serve) -> None:
    server = serve_fast(Adder, max_sessions=1)
    server.socket().step(amount=1)
    assert (server.health()["status"], server.health()["available"]) == ("healthy", 0)


def test_metrics_are_prometheus_text(serve_fast: Serve) -> None:
    server = serve_fast(Scripted)
    ws = server.socket()
    ws.step(value=1)
    ws.step(fail="x")
    answer = server.http()("GET", "/metrics")
    text = answer.body.decode()
    assert answer.headers["Content-Type"].startswith("text/plain")
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples['paddock_sessions{worker="0"}'] == "1"
    assert samples['paddock_call_seconds_count{worker="0",method="step"}'] == "2"
    assert samples['paddock_errors_total{worker="0",code="EXECUTION_ERROR"}'] == "1"
    assert all(float(value) >= 0 for value in samples.values())


def test_metadata_has_all_its_keys(serve_fast: Serve) -> None:
    metadata = serve_fast(Counter).http()("GET", "/metadata").json
    assert metadata["name"] == "Counter"
    assert metadata.keys() == {"name", "description", "readme_content", "version", "author", "documentation_url"}


def test_schema_publishes_four_schemas(serve_fast: Serve) -> None:
    schema = serve_fast(Counter).http()("GET", "/schema").json
    assert {"action", "observation", "state", "reset_observation"} <= schema.keys()
    assert schema["action"]["properties"]["amount"]["minimum"] == 0


def test_openapi_and_docs(serve_fast: Serve) -> None:
    http = serve_fast(Counter).http()
    described = http("GET", "/openapi.json").json
    assert {"/reset", "/step", "/state"} <= described["paths"].keys()
    assert isinstance(described["info"]["version"], str)
    assert http("GET", "/docs").headers["Content-Type"].startswith("text/html")


def test_sessions_are_listed_without_their_tokens(serve_fast: Serve) -> None:
    server = serve_fast(Kit)
    http = server.http()
    tokens = [http("POST", "/reset").headers["Session-Id"], server.socket(Session_Resume="new").token]
    created = http.rpc("openenv/session/create")["result"]["session_id"]
    wait_until(lambda: server.health()["sessions"] == 3)
    response = http("GET", "/sessions").body.decode()
    assert all(str(token) not in response for token in (*tokens, created))


def test_production_has_no_episodes_over_http(serve_fast: Serve) -> None:
    server = serve_fast(Kit, mode="production")
    http = server.http()
    for method, path in (("POST", "/reset"), ("POST", "/step"), ("GET", "/state")):
        assert http(method, path, {} if method == "POST" else None).status == 404
    assert http("GET", "/health").status == 200
    assert "/reset" not in http("GET", "/openapi.json").json["paths"]
    assert http.rpc("tools/list")["result"]["tools"]


# -- tasks ----------------------------------------------------------------------------------------


class Split(BaseModel):
    name: str
    type: str


class Tasked(Adder):
    TASKS = ("a", "b", "c")

    def list_splits(self) -> list[Any]:
        return ["train", "extra", Split(name="held out", type="test")]

    async def list_tasks(self, split: str) -> list[str]:
        return list({"train": self.TASKS}[split])

    def num_tasks(self, split: str) -> int:
        return len({"train": self.TASKS}[split])

    def get_task(self, split: str, index: int) -> str:
        if split == "boom":
            raise RuntimeError("token=hunter2")
        return self.TASKS[index]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[str]:
        return list(self.TASKS[start:stop])


def test_task_routes(serve_fast: Serve) -> None:
    http = serve_fast(Tasked, app={"env_name": "Quiz"}).http()
    assert http("GET", "/list_environments").json == ["Quiz"]
    assert http("GET", "/quiz/splits").json == [
        {"name": "train", "type": "train"},
        {"name": "extra", "type": "validation"},
        {"name": "held out", "type": "test"},
    ]
    assert http("POST", "/Quiz/tasks", {"split": "train"}).json == {"tasks": ["a", "b", "c"], "env_name": "Quiz"}
    assert http("POST", "/Quiz/num_tasks", {"split": "train"}).json == {"num_tasks": 3}
    assert http("POST", "/Quiz/task", {"split": "train", "index": 1}).json == {"task": "b"}
    assert http("POST", "/Quiz/task_range", {"split": "train", "start": 1}).json == {"tasks": ["b", "c"]}


def test_tasks_and_metadata_are_asked_on_the_thread_that_built_them(serve_fast: Serve) -> None:
    class Affine(Tasked):
        thread_affine = True

        def __init__(self) -> None:
            super().__init__()
            self.database = sqlite3.connect(":memory:")

        def num_tasks(self, split: str) -> int:
            return self.database.execute("select 7").fetchone()[0]  # type: ignore[no-any-return]

        def get_metadata(self) -> Any:
            self.database.execute("select 1")
            return super().get_metadata()

        def close(self) -> None:
            self.database.close()
            super().close()

    http = serve_fast(Affine, app={"env_name": "quiz"}).http()
    assert http("POST", "/quiz/num_tasks", {"split": "train"}).json == {"num_tasks": 7}
    assert http("GET", "/metadata").status == 200


def test_task_routes_that_fail(serve_fast: Serve) -> None:
    http = serve_fast(Tasked, app={"env_name": "Quiz"}).http()
    missing = http("POST", "/Quiz/task", {"split": "train", "index": 9})
    assert (missing.status, missing.json["detail"]) == (400, "Invalid task index")
    assert http("POST", "/Quiz/num_tasks", {"split": "nope"}).status == 400
    assert http("POST", "/Other/num_tasks", {"split": "train"}).status == 404
    assert http("POST", "/Quiz/num_tasks", {}).status == 422


def test_a_task_method_that_raises_is_500_as_json_and_the_connection_is_kept(serve_fast: Serve) -> None:
    http = serve_fast(Tasked, app={"env_name": "Quiz"}).http()
    answer = http("POST", "/Quiz/task", {"split": "boom", "index": 1})
    port = http.local_port
    assert answer.status == 500
    assert answer.json["detail"] == "RuntimeError: token=***"
    assert http("GET", "/list_environments").status == 200
    assert http.local_port == port


def test_an_environment_without_tasks_says_501(serve_fast: Serve) -> None:
    answer = serve_fast(Adder).http()("GET", "/adder/splits")
    assert answer.status == 501
    assert answer.json["detail"] == "list_splits is not supported for this environment"


def test_metadata_that_raises_is_500_as_json(serve_fast: Serve) -> None:
    class Shy(Adder):
        def get_metadata(self) -> Any:
            raise RuntimeError("api_key=hunter2")

    http = serve_fast(Shy).http()
    answer = http("GET", "/metadata")
    port = http.local_port
    assert answer.status == 500
    assert "hunter2" not in answer.body.decode()
    assert http("GET", "/list_environments").status == 200
    assert http.local_port == port


def test_openenvs_arguments_are_taken() -> None:
    from paddock import create_app
    from paddock.config import ConcurrencyConfig

    app = create_app(Adder, Add, None, env_name="x", max_concurrent_envs=3)
    assert app.state.service.config.limits.max_sessions == 3
    other = create_app(Adder, concurrency_config=ConcurrencyConfig(max_concurrent_envs=2, session_timeout=5))
    assert other.state.service.config.limits.session_timeout == 5
    with pytest.raises(ValueError, match="exclude"):
        create_app(Adder, max_concurrent_envs=3, concurrency_config=ConcurrencyConfig())
    with pytest.raises(ValueError, match="concurrent"):
        create_app(Alone, max_concurrent_envs=3)


class Sluggish(Adder):
    def list_splits(self) -> list[str]:
        time.sleep(1)
        return ["train"]


def test_task_methods_have_a_deadline(serve_fast: Serve) -> None:
    answer = serve_fast(Sluggish, step_timeout=0.1).http()("GET", "/sluggish/splits")
    assert (answer.status, answer.json["code"]) == (504, "STEP_TIMEOUT")


# -- an application under loops that come and go ------------------------------------------------------


async def requested(app: Any, method: str, path: str, document: Any = None, cookie: str = "") -> tuple[int, Any, str]:
    """As a test client does: without a server, and without a lifespan."""
    body = b"" if document is None else json.dumps(document).encode()
    headers = [(b"host", b"testserver"), (b"content-type", b"application/json"), (b"cookie", cookie.encode())]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
    sent: list[Any] = []
    waiting = asyncio.Event()

    async def receive() -> Any:
        if not waiting.is_set():
            waiting.set()
            return {"type": "http.request", "body": body}
        await asyncio.sleep(60)

    async def send(event: Any) -> None:
        sent.append(event)

    await app(scope, receive, send)
    cookies = [value.decode() for name, value in sent[0]["headers"] if name == b"set-cookie"]
    return sent[0]["status"], json.loads(sent[1]["body"]), "".join(cookies).partition(";")[0]


def test_an_application_outlives_its_loops(lives: list[Watched]) -> None:
    app, cookie = create_app(Adder), ""
    for _ in range(3):
        status, _, cookie = asyncio.run(requested(app, "POST", "/reset", {}, cookie))
        assert status == 200
        status, answer, _ = asyncio.run(requested(app, "POST", "/step", {"action": {"amount": 2}}, cookie))
        assert (status, answer["observation"]["total"]) == (200, 2)
    asyncio.run(requested(app, "GET", "/health"))
    wait_until(lambda: all(life.closes == 1 for life in lives))


def test_create_app_takes_what_openenvs_takes_for_its_page() -> None:
    create_app(Adder, Add, gradio_builder=None, custom_tab_name="x", show_default_tab=True)
    with pytest.raises(TypeError, match="nonsense"):
        create_app(Adder, nonsense=1)
    with pytest.raises(ConfigError, match="max_sessions is 0"):
        create_app(Adder, max_concurrent_envs=0)


def test_a_class_that_defines_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no reset"):
        create_app(type("Empty", (Environment,), {}))
