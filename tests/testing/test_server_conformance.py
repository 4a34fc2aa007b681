"""Our server passes, and each check fails for a server that breaks it, and says why."""

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paddock import create_app
from paddock.envs.echo import Echo
from paddock.errors import ConnectFailed
from paddock.testing import Result, check_server, failed, server_subject
from paddock.testing.checks import run_check
from paddock.testing.server import SERVER

from .servers import HANG_UP, Mangler, running, serving

Spoil = Callable[[Mangler], None]


def examined(url: str, **options: Any) -> dict[str, Result]:
    return {result.name: result for result in asyncio.run(check_server(url, **options))}


async def examined_by(name: str, url: str) -> Result:
    """The result of one check alone."""
    subject = server_subject.ServerSubject(url, timeout=2.0)
    await subject.greet()
    [check] = [check for check in SERVER.checks if check.name == name]
    return await run_check(check, subject, 10.0)


@pytest.mark.parametrize("target", ["counter", "echo"])
@pytest.mark.parametrize("options", [(), ("--max-sessions", "1"), ("--mode", "production")], ids=" ".join)
def test_our_server_passes(target: str, options: tuple[str, ...]) -> None:
    with serving(target, *options) as url:
        first, second = examined(url), examined(url)
    assert {result.outcome for result in [*first.values(), *second.values()]} <= {"passed", "skipped"}
    assert len(first) == len(SERVER.checks)


def test_a_token_is_sent_along() -> None:
    with serving("counter", "--auth-token", "secret") as url:
        assert failed(examined(url, token="secret").values()) == []
        with pytest.raises(ConnectFailed, match="401"):
            examined(url)


def test_a_refused_connection_is_no_server() -> None:
    with pytest.raises(ConnectFailed, match="cannot reach"):
        examined("http://127.0.0.1:9")


def test_the_suite_leaves_no_session_on_the_server() -> None:
    with serving("counter", "--max-sessions", "2") as url:
        examined(url)
        health = asyncio.run(server_subject.ServerSubject(url).get("/health")).document
        assert health["sessions"] == 0


# -- servers that get it wrong ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def app() -> Mangler:
    return Mangler(create_app(Echo, max_concurrent_envs=4))


@pytest.fixture(scope="module")
def url(app: Mangler) -> Iterator[str]:
    with running(app) as url:
        yield url


@pytest.fixture
def mangler(app: Mangler) -> Iterator[Mangler]:
    app.be_good()
    yield app
    app.be_good()


def on_path(path: str, **changes: Any) -> Spoil:
    """Change keys of the JSON that a path answers with; `...` takes a key away."""

    def spoil(mangler: Mangler) -> None:
        def http(request: str, _: Any, status: int, answer: Any) -> tuple[int, Any]:
            return status, changed(answer, changes) if request == path else answer

        mangler.http = http

    return spoil


def on_call(changes: dict[str, Any], *, method: str | None = None, code: int | None = None) -> Spoil:
    """Change the answer to a JSON-RPC method, or every error with a code."""

    def spoil(mangler: Mangler) -> None:
        def http(path: str, request: Any, status: int, answer: Any) -> tuple[int, Any]:
            meant = method is not None and isinstance(request, dict) and request.get("method") == method
            failed = code is not None and isinstance(answer, dict) and answer.get("error", {}).get("code") == code
            return status, changed(answer, changes) if path == "/mcp" and (meant or failed) else answer

        mangler.http = http

    return spoil


def on_frame(kind: str, changes: dict[str, Any] | object) -> Spoil:
    """Change the answer to frames of a type, or hang up."""
    return on_frames(lambda request: isinstance(request, dict) and request.get("type") == kind, changes)


def on_frames(is_meant: Callable[[Any], bool], changes: Any) -> Spoil:
    def spoil(mangler: Mangler) -> None:
        def frame(request: Any, answer: dict[str, Any]) -> Any:
            if not is_meant(request):
                return answer
            return HANG_UP if changes is HANG_UP else changed(answer, changes)

        mangler.frame = frame

    return spoil


def on_error(code: str) -> Spoil:
    """Give an error frame another code."""

    def spoil(mangler: Mangler) -> None:
        def frame(_: Any, answer: dict[str, Any]) -> Any:
            wrong = answer.get("type") == "error" and answer["data"]["code"] == code
            return changed(answer, {"data": {"code": "OOPS"}}) if wrong else answer

        mangler.frame = frame

    return spoil


def setting(**attributes: Any) -> Spoil:
    def spoil(mangler: Mangler) -> None:
        for name, value in attributes.items():
            setattr(mangler, name, value)

    return spoil


def without_header(unwanted: str) -> Spoil:
    return setting(headers=lambda name: name != unwanted)


def answering_notifications(mangler: Mangler) -> None:
    def http(_path: str, _asked: Any, status: int, answer: Any) -> tuple[int, Any]:
        return (200, {"jsonrpc": "2.0", "id": None, "result": {}}) if status == 202 else (status, answer)

    mangler.http = http


def changing_its_mind(mangler: Mangler) -> None:
    def frame(request: Any, answer: dict[str, Any]) -> Any:
        if isinstance(request, dict) and request.get("type") == "step":
            frame.count += 1  # type: ignore[attr-defined]
            return changed(answer, {"data": {"reward": frame.count}})  # type: ignore[attr-defined]
        return answer

    frame.count = 0  # type: ignore[attr-defined]
    mangler.frame = frame


def status_of_bad_actions(mangler: Mangler) -> None:
    mangler.http = lambda path, request, status, answer: (400 if status == 422 else status, answer)


def changed(document: Any, changes: dict[str, Any]) -> Any:
    result = dict(document)
    for key, value in changes.items():
        if value is ...:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = changed(result[key], value)
        else:
            result[key] = value
    return result


def is_array(request: Any) -> bool:
    return isinstance(request, (list, int)) or request is None


WRONG_CODE = {"error": {"code": -1}}
FAILURES: list[tuple[str, Spoil, str]] = [
    ("health is healthy", on_path("/health", status="sick"), "sick"),
    ("metadata names the environment", on_path("/metadata", description=...), "/metadata"),
    ("schema describes the environment", on_path("/schema", state=...), "no state"),
    ("openapi lists the routes", on_path("/openapi.json", paths={"/state": ...}), "/reset and /step"),
    ("a socket gets a session", setting(refuses_sockets=True), "refused"),
    ("reset is answered with an observation", on_frame("reset", {"type": "state"}), "no observation"),
    ("step is answered with an observation", on_frame("step", {"data": {"done": ...}}), "no done"),
    ("state tells the episode and its steps", on_frame("state", {"data": {"step_count": ...}}), "step_count"),
    (
        "requests sent ahead are answered in order",
        on_frame("reset", {"type": "state"}),
        "state, state, state",
    ),
    ("text that is no json is refused", on_error("INVALID_JSON"), "OOPS"),
    ("an unknown type is refused", on_error("UNKNOWN_TYPE"), "OOPS"),
    ("a bad envelope is refused", on_error("VALIDATION_ERROR"), "OOPS"),
    ("a bad action is refused", on_error("VALIDATION_ERROR"), "OOPS"),
    ("an array keeps the connection", on_frames(is_array, HANG_UP), "hung up"),
    ("a binary frame keeps the connection", on_frames(lambda f: isinstance(f, bytes), HANG_UP), "hung up"),
    ("deep json keeps the connection", on_frames(lambda f: str(f)[:2] == "[[", HANG_UP), "hung up"),
    ("close is answered by closing", setting(closing_code=1011), "code 1011"),
    ("an unknown session id is refused", on_error("SESSION_ERROR"), "OOPS"),
    ("a new episode begins after a dropped socket", setting(is_full_after_a_drop=True), "after the drop"),
    ("a step goes on after a dropped socket", without_header("session-id"), "no Session-Id"),
    ("a repeated request is not carried out twice", changing_its_mind, "and then with"),
    ("http reset and step are answered", on_path("/step", metadata=...), "without metadata"),
    ("http refuses a bad action", status_of_bad_actions, "HTTP 400"),
    ("http calls with a session id share an episode", without_header("session-id"), "no Session-Id"),
    ("mcp lists the tools", on_call({"result": {"tools": [{"name": 1}]}}, method="tools/list"), "listed as"),
    ("mcp calls a tool", on_call({"result": {"data": ...}}, method="tools/call"), "no data"),
    (
        "results have the keys of the specification",
        on_call({"result": {"isError": ...}}, method="tools/call"),
        "isError is missing",
    ),
    ("mcp initializes", on_call({"result": {"serverInfo": ...}}, method="initialize"), "initialize"),
    ("mcp answers a ping", on_call({"result": {"pong": 1}}, method="ping"), "pong"),
    ("a notification gets no answer", answering_notifications, "answered with"),
    ("broken json is error 32700", on_call(WRONG_CODE, code=-32700), "broken JSON"),
    ("an invalid request is error 32600", on_call(WRONG_CODE, code=-32600), "-1"),
    ("an invalid request keeps its id", on_call({"id": None}, code=-32600), "id None"),
    ("an unknown method is error 32601", on_call(WRONG_CODE, code=-32601), "-1"),
    ("bad parameters are error 32602", on_call(WRONG_CODE, code=-32602), "without a name"),
    ("an unknown tool is error 32602", on_call(WRONG_CODE, code=-32602), "unknown tool"),
    (
        "a created session can be joined and closed",
        on_call({"result": {"session_id": 5}}, method="openenv/session/close"),
        "session/close",
    ),
    (
        "the mcp socket answers",
        on_frames(lambda f: isinstance(f, dict) and f.get("method") == "no/such/method", {"id": 6}),
        "id 6",
    ),
]


@pytest.mark.parametrize(("name", "spoil", "detail"), FAILURES, ids=[name for name, _, _ in FAILURES])
def test_a_broken_server_is_found_out(
    mangler: Mangler, url: str, monkeypatch: pytest.MonkeyPatch, name: str, spoil: Spoil, detail: str
) -> None:
    monkeypatch.setattr(server_subject, "SLOT_SECONDS", 0.2)
    spoil(mangler)
    result = asyncio.run(examined_by(name, url))
    assert result.outcome == "failed", result
    assert re.search(detail, result.detail), result
    assert result.hint


def test_every_check_can_fail() -> None:
    assert {name for name, _, _ in FAILURES} == {check.name for check in SERVER.checks}


def test_a_server_that_answers_nothing_well_is_examined_to_the_end(mangler: Mangler, url: str) -> None:
    mangler.http = lambda path, request, status, answer: (500, [])
    mangler.frame = lambda request, answer: HANG_UP
    results = examined(url, timeout=1.0)
    assert len(results) == len(SERVER.checks)
    assert not {result.outcome for result in results.values()} & {"passed", "info"}


def test_what_openenv_cannot_do_is_a_note(mangler: Mangler, url: str) -> None:
    def spoil(mangler: Mangler) -> None:
        without_header("paddock-version")(mangler)
        on_call({"result": {"pong": 1}}, method="ping")(mangler)

    spoil(mangler)
    ping = examined(url)["mcp answers a ping"]
    assert (ping.outcome, ping.hint) == ("info", None)
    assert ping.detail.startswith("beyond OpenEnv: ")
