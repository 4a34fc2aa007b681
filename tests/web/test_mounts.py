"""The page in a server and in a plane: what it offers there, and whose token opens it."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paddock.web
from environments import Adder
from paddock import create_app
from paddock.config import ENABLE_WEB_INTERFACE, Access, Limits, ServerConfig
from paddock.web.mounts import page_in_server
from paddock.web.server_status import merge_workers

from .browser import TOKEN, Browser, events

LOCKED = ServerConfig(limits=Limits(max_sessions=4), access=Access(token=TOKEN))


async def served(folder: Path, work: Any, config: ServerConfig = LOCKED) -> None:
    """Do something with a browser in front of a server with the page."""
    app = create_app(Adder, config=config)
    page = page_in_server(app, folder)
    app.state.service.start()
    try:
        await work(Browser(app, token=config.access.token), page)
    finally:
        await app.state.service.stop(0)
        page.close()


def test_a_server_offers_play_and_itself(recorded: Path) -> None:
    async def look(browser: Browser, _: Any) -> None:
        about = (await browser.ask("GET", "/web/api/about")).json()
        assert about["parts"] == {"rollouts": True, "play": True, "server": True, "fleet": False, "training": False}
        assert about["environment"].lower() == "adder"
        assert (await browser.ask("GET", "/web/api/rollouts")).json()["total"] == 20
        status = (await browser.ask("GET", "/web/api/server")).json()
        assert status["health"]["capacity"] == 4
        assert (await browser.ask("GET", "/web/api/fleet")).status == 404

    asyncio.run(served(recorded, look))


def test_without_a_store_there_are_no_rollouts(tmp_path: Path) -> None:
    async def look(browser: Browser, _: Any) -> None:
        assert (await browser.ask("GET", "/web/api/about")).json()["parts"]["rollouts"] is False
        answer = await browser.ask("GET", "/web/api/rollouts")
        assert answer.status == 404
        assert "paddock rollout" in answer.json()["error"]["hint"]

    asyncio.run(served(tmp_path / "none", look))
    assert not (tmp_path / "none").exists()


def test_each_visitor_has_an_episode(recorded: Path) -> None:
    async def play(browser: Browser, _: Any) -> None:
        other = Browser(browser.app)
        for visitor in (browser, other):
            assert (await visitor.ask("POST", "/web/reset", b"{}")).status == 200
        for amount in (1, 2):
            await browser.ask("POST", "/web/step", b'{"action": {"amount": %d}}' % amount)
        step = await other.ask("POST", "/web/step", b'{"action": {"amount": 5}}')
        assert step.json()["observation"]["total"] == 5
        assert (await browser.ask("GET", "/web/state")).json()["step_count"] == 2
        assert (await browser.ask("GET", "/web/metadata")).json()["name"]
        assert (await browser.ask("GET", "/web/schema")).json()["action"]
        sessions = (await browser.ask("GET", "/web/api/server")).json()
        assert len(sessions["sessions"]) == 2
        assert sessions["steps"] == 3
        assert (await browser.ask("POST", "/web/step", b"{broken")).status == 422
        assert (await browser.ask("POST", "/web/step", b'{"action": {"amount": "x"}}')).status == 422

    asyncio.run(served(recorded, play))


def test_playing_needs_the_token(recorded: Path) -> None:
    async def play(browser: Browser, _: Any) -> None:
        stranger = Browser(browser.app, token=None)
        for method, path in (
            ("GET", "state"),
            ("GET", "metadata"),
            ("POST", "reset"),
            ("POST", "step"),
            ("GET", "schema"),
        ):
            assert (await stranger.ask(method, f"/web/{path}", b"{}")).status == 401
        assert (await stranger.ask("GET", "/web/")).status == 200
        assert (await stranger.ask("GET", "/metadata")).status == 401
        await stranger.ask("POST", "/web/api/access", b'{"token": "%s"}' % TOKEN.encode())
        assert (await stranger.ask("GET", "/web/metadata")).status == 200
        # The cookie opens the rest of the server too, for our own page alone.
        assert (await stranger.ask("GET", "/metadata")).status == 200
        assert (await stranger.ask("GET", "/metadata", sec_fetch_site="cross-site")).status == 401

    asyncio.run(served(recorded, play))


def test_the_server_is_followed_until_it_stops(recorded: Path) -> None:
    async def follow(browser: Browser, _: Any) -> None:
        async with browser.asking("GET", "/web/api/server/live") as (_, _, pieces):
            name, document = await anext(events(pieces))
            assert (name, document["health"]["status"]) == ("server", "healthy")

    asyncio.run(served(recorded, follow))


def test_a_draining_server_ends_the_streams_of_listeners(recorded: Path) -> None:
    async def follow(browser: Browser, _: Any) -> None:
        async with browser.asking("GET", "/web/api/live") as (_, _, pieces):
            stream = events(pieces)
            assert (await anext(stream))[0] == "hello"
            await browser.app.state.service.stop(0)
            async with asyncio.timeout(3):
                assert [each async for each in stream] == []

    asyncio.run(served(recorded, follow))


def test_without_the_page_its_paths_are_unknown() -> None:
    browser = Browser(create_app(Adder, config=LOCKED))
    for path in ("/web/", "/web/api/about", "/"):
        assert browser.get(path).status == 404


@pytest.mark.parametrize(
    ("value", "expected"), [("true", True), ("1", True), ("YES", True), ("no", False), ("", False)]
)
def test_openenvs_variable_asks_for_the_page(value: str, expected: bool) -> None:
    assert ENABLE_WEB_INTERFACE.read({"ENABLE_WEB_INTERFACE": value}) is expected


def test_a_plane_shows_its_instances(tmp_path: Path) -> None:
    from paddock.fleet.plane import HostedEnvironment, PlaneSettings
    from paddock.fleet.plane.app import create_plane
    from paddock.web.mounts import page_in_plane

    async def look() -> None:
        hosted = (HostedEnvironment("echo", "echo", ("v1",)),)
        app = create_plane(PlaneSettings(state=tmp_path, environments=hosted, api_key=TOKEN, warm=0))
        page = page_in_plane(app, tmp_path / "store")
        await app.state.plane.start()
        try:
            browser, stranger = Browser(app), Browser(app, token=None)
            about = (await browser.ask("GET", "/web/api/about")).json()
            assert [name for name, is_there in about["parts"].items() if is_there] == ["fleet"]
            status = (await browser.ask("GET", "/web/api/fleet")).json()
            assert (status["instances"], status["limit"], status["environments"]) == ([], 100, ["echo"])
            assert (await stranger.ask("GET", "/web/api/fleet")).status == 401
            assert (await stranger.ask("GET", "/web/")).status == 200
            assert (await stranger.ask("GET", "/v1/env/instances")).status == 401
        finally:
            page.close()
            await app.state.plane.stop()

    asyncio.run(look())


def test_workers_add_up() -> None:
    def worker(sessions: int, steps: list[int]) -> dict[str, Any]:
        buckets = [[0.1, steps[0]], [None, sum(steps)]]
        return {
            "health": {"sessions": sessions, "capacity": 9, "waiting": 0, "running": 1, "hung": 0, "threads": 2},
            "sessions": [{"id": f"s{number}"} for number in range(sessions)],
            "latency": {"step": {"buckets": buckets, "sum": 0.5, "count": sum(steps)}},
            "errors": {"STEP_TIMEOUT": 1}, "closed": {"done": 2},
            "steps": sum(steps), "queue": 0, "opened": 3, "refused": 0, "resumed": 0,
        }  # fmt: skip

    status = merge_workers([worker(1, [2, 1]), worker(2, [5, 0])])
    assert (status["health"]["sessions"], status["health"]["capacity"], status["workers"]) == (3, 9, 2)
    assert status["latency"]["step"] == {"buckets": [[0.1, 7], [None, 8]], "sum": 1.0, "count": 8}
    assert (status["steps"], status["errors"], status["closed"]) == (8, {"STEP_TIMEOUT": 2}, {"done": 4})
    assert len(status["sessions"]) == 3


def test_a_server_has_its_page_without_the_packages_of_rollouts() -> None:
    code = """
import sys
sys.modules["zstandard"] = sys.modules["aiohttp"] = None
from environments import Adder
from paddock import create_app
from paddock.web.mounts import page_in_server
print(page_in_server(create_app(Adder)).describe()["parts"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.stdout.strip() == str(
        {"rollouts": False, "training": False, "play": True, "server": True, "fleet": False}
    )


def test_the_page_is_answered_by_whichever_worker_is_asked(recorded: Path) -> None:
    class SiblingWorkers:
        """Takes every request for somebody else's."""

        async def forwarded(self, scope: Any, receive: Any, send: Any, header: Any) -> bool:
            await send({"type": "http.response.start", "status": 299, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return True

    async def look(browser: Browser, _: Any) -> None:
        browser.app.state.service.siblings = SiblingWorkers()
        assert (await browser.ask("GET", "/web/api/about")).status == 200
        assert (await browser.ask("GET", "/web/state")).status == 299
        browser.app.state.service.siblings = None

    asyncio.run(served(recorded, look))


def test_the_page_names_all_its_modules_so_that_they_come_at_once() -> None:
    static = Path(paddock.web.__file__).parent / "static"
    named = set(re.findall(r'href="js/(\w+\.js)"', (static / "index.html").read_text())) | {"main.js"}
    assert named == {path.name for path in (static / "js").iterdir()}


def test_an_app_that_asks_for_the_page_by_environment_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def paths() -> set[str]:
        return {getattr(route, "path", "") for route in create_app(Adder).router.routes}

    assert "/web" not in paths()
    monkeypatch.setenv("ENABLE_WEB_INTERFACE", "yes")
    assert "/web" in paths()
