"""Who may talk to the server, on every transport."""

import re
from typing import Any

import pytest
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from environments import Adder, Kit
from paddock import create_app
from paddock.config import Access, Limits, ServerConfig
from paddock.errors import ConfigError, Forbidden, Unauthorized
from paddock.server.access import check_access, check_browser, has_token
from paddock.server.listening import bind, url_of
from paddock.server.run import require_token
from running import Serve

TOKEN = "correct horse"
LOCKED = Access(token=TOKEN)
GOOD = f"Bearer {TOKEN}"
WRONG = [
    None,
    "",
    "Bearer",
    "Bearer ",
    "Bearer wrong",
    f"Basic {TOKEN}",
    TOKEN,
    "Bearer \xff\xfe",
    f"Bearer {TOKEN}x",
    "Bearer correct",
]


def headers(**values: str | None) -> Any:
    return {name.replace("_", "-"): value for name, value in values.items()}.get


def test_an_app_wants_the_token_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_AUTH_TOKEN", TOKEN)
    service = create_app(Adder).state.service
    assert service.config.access.token == TOKEN
    require_token("0.0.0.0", service)


@pytest.mark.parametrize("sent", WRONG)
def test_only_the_token_opens(sent: str | None) -> None:
    with pytest.raises(Unauthorized):
        check_access(LOCKED, headers(authorization=sent))


@pytest.mark.parametrize("sent", [GOOD, f"bearer {TOKEN}", f"BEARER  {TOKEN} "])
def test_the_token_opens(sent: str) -> None:
    check_access(LOCKED, headers(authorization=sent))
    assert has_token(LOCKED, headers(authorization=sent))


def test_the_answer_is_the_same_whatever_was_sent() -> None:
    collected = set()
    for sent in WRONG:
        with pytest.raises(Unauthorized) as refused:
            check_access(LOCKED, headers(authorization=sent))
        collected.add((refused.value.message, refused.value.hint))
    assert len(collected) == 1
    assert TOKEN not in str(collected)


def test_the_token_is_not_shown() -> None:
    assert TOKEN not in repr(ServerConfig(access=LOCKED))


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "LOCALHOST"]
)
def test_names_of_this_machine_are_accepted(host: str) -> None:
    check_browser(Access(), headers(host=host))


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "127.evil.example", "localhost.evil.example"],
)
def test_a_foreign_host_is_refused(host: str) -> None:
    with pytest.raises(Forbidden):
        check_browser(Access(), headers(host=host))


def test_a_host_can_be_allowed() -> None:
    check_browser(Access(hosts=frozenset(["box.lan"])), headers(host="box.lan:8000"))


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://evil.example:8000",
        "null",
        "http://localhost.evil.example",
        "http://[",
        "file://",
        "",
        "http://127.evil.example",
    ],
)
@pytest.mark.parametrize("access", [Access(), LOCKED])
def test_a_foreign_page_is_refused(origin: str, access: Access) -> None:
    with pytest.raises(Forbidden):
        check_browser(access, headers(host="localhost:8000", origin=origin))


@pytest.mark.parametrize("origin", ["http://localhost:8000", "http://127.0.0.1:8000", "http://[::1]:8000"])
def test_our_own_page_passes(origin: str) -> None:
    check_browser(Access(), headers(host="localhost:8000", origin=origin))


def test_an_origin_can_be_allowed() -> None:
    allowed = Access(origins=frozenset(["https://app.example"]))
    check_browser(allowed, headers(host="localhost", origin="https://app.example"))


# -- on the wire ----------------------------------------------------------------------------------

ROUTES = [
    ("POST", "/reset"),
    ("POST", "/step"),
    ("GET", "/state"),
    ("GET", "/schema"),
    ("GET", "/metadata"),
    ("GET", "/metrics"),
    ("GET", "/sessions"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/list_environments"),
    ("POST", "/kit/tasks"),
    ("POST", "/mcp"),
    ("GET", "/mcp"),
    ("DELETE", "/mcp"),
    ("GET", "/nowhere"),
]


def every_route() -> list[tuple[str, str]]:
    """What the application routes, with something in place of the parameters, and what it takes besides."""
    routes = [route for route in create_app(Kit).routes if getattr(route, "methods", None)]
    result = {(method, re.sub(r"{[^}]*}", "x", route.path)) for route in routes for method in route.methods}
    return sorted({*result, *ROUTES} - {("GET", "/health"), ("HEAD", "/health")})


def test_every_route_wants_the_token(serve_fast: Serve) -> None:
    http = serve_fast(Kit, access=LOCKED).http()
    for method, path in every_route():
        for sent in ({}, {"authorization": "Bearer wrong"}):
            answer = http(method, path, **sent)
            assert answer.status == 401, (method, path)
            assert TOKEN not in answer.body.decode()


def test_the_token_is_accepted_everywhere(serve: Serve) -> None:
    server = serve(Kit, access=LOCKED)
    http = server.http()
    assert http("POST", "/reset", authorization=GOOD).status == 200
    assert http.rpc("tools/list", authorization=GOOD)["result"]["tools"]
    assert server.socket(Authorization=GOOD).ask({"type": "state"})["type"] == "state"
    call = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    assert server.socket("/mcp", Authorization=GOOD).ask(call)["result"] == {}


def test_health_is_open_but_short_without_the_token(serve_fast: Serve) -> None:
    http = serve_fast(Kit, access=LOCKED).http()
    assert http("GET", "/health").json.keys() == {"status"}
    assert "sessions" in http("GET", "/health", authorization=GOOD).json


@pytest.mark.parametrize("path", ["/ws", "/mcp", "/ws?session_id=x", "/ws?vector=1"])
def test_a_socket_wants_the_token(serve: Serve, path: str) -> None:
    server = serve(Kit, access=LOCKED)
    for sent in ("", "Authorization: Bearer wrong\r\n"):
        raw = server.raw(path, sent)
        assert raw.status == 401
        assert TOKEN not in raw.head
    assert server.health()["status"] == "healthy"


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
@pytest.mark.parametrize("origin", ["https://evil.example", "http://[", "null"])
def test_a_socket_of_a_foreign_page_is_refused(serve: Serve, path: str, origin: str) -> None:
    assert serve(Kit).raw(path, f"Origin: {origin}\r\n").status == 403


def test_a_foreign_page_is_refused_on_every_route(serve_fast: Serve) -> None:
    http = serve_fast(Kit).http()
    for method, path in (*ROUTES, ("GET", "/health")):
        for origin in ("https://evil.example", "http://["):
            assert http(method, path, origin=origin).status == 403, (method, path, origin)


def test_a_foreign_host_is_refused_on_every_transport(serve_fast: Serve) -> None:
    server = serve_fast(Kit)
    http = server.http()
    for method, path in ROUTES:
        http.connection.putrequest(method, path, skip_host=True)
        http.connection.putheader("Host", "evil.example")
        http.connection.putheader("Content-Length", "0")
        http.connection.endheaders()
        answer = http.connection.getresponse()
        answer.read()
        assert answer.status == 403


def test_a_page_of_our_own_may_connect(serve: Serve) -> None:
    server = serve(Kit)
    assert server.raw("/ws", f"Origin: http://localhost:{server.port}\r\n").status == 101


def test_the_token_never_reaches_a_client(serve_fast: Serve) -> None:
    class Leaky(Adder):
        def step(self, action: Any) -> Any:
            raise RuntimeError(f"environ is {TOKEN}")

    server = serve_fast(Leaky, access=LOCKED)
    answer = server.socket(Authorization=GOOD).step(amount=1)
    assert TOKEN not in str(answer)
    assert "environ is" in str(answer)


def test_beyond_loopback_a_token_is_required() -> None:
    class Served:
        config = ServerConfig(limits=Limits())

    class Locked:
        config = ServerConfig(access=LOCKED)

    for host in ("0.0.0.0", "192.168.1.5", "::", "", "example.org"):
        with pytest.raises(ConfigError, match="token") as refused:
            require_token(host, Served)  # type: ignore[arg-type]
        assert "--auth-token" in (refused.value.hint or "")
        require_token(host, Locked)  # type: ignore[arg-type]
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.2"):
        require_token(host, Served)  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_a_clear_error() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(ConfigError, match="cannot listen") as refused:
            bind("127.0.0.1", first.getsockname()[1])
        assert "--port" in (refused.value.hint or "")
        assert url_of(first, "127.0.0.1") == f"http://127.0.0.1:{first.getsockname()[1]}"


def test_a_port_that_cannot_be_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        bind("127.0.0.1", 99999)


class OwnDoors(Adder):
    @staticmethod
    def http_routes() -> list[Any]:
        async def talk(websocket: WebSocket) -> None:
            await websocket.accept()
            await websocket.send_text("secret")

        return [WebSocketRoute("/own", talk)]

    def list_splits(self) -> list[str]:
        return ["train"]


def test_sockets_of_an_authors_own_are_behind_the_token(serve: Serve) -> None:
    server = serve(OwnDoors, access=Access(token="opens"))
    with pytest.raises(InvalidStatus, match="401"):
        connect(f"ws://127.0.0.1:{server.port}/own", proxy=None)
    allowed = {"Authorization": "Bearer opens"}
    with connect(f"ws://127.0.0.1:{server.port}/own", proxy=None, additional_headers=allowed) as ws:
        assert ws.recv() == "secret"


def test_without_a_page_nothing_below_its_path_is_open(serve_fast: Serve) -> None:
    server = serve_fast(OwnDoors, access=Access(token="opens"), app={"env_name": "web"})
    answer = server.http()("GET", "/web/splits")
    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert server.http()("GET", "/web/splits", Authorization="Bearer opens").status == 200
