"""Who may see what, and what every answer tells a browser to refuse."""

from pathlib import Path
from urllib.parse import quote

import pytest

from paddock.config import Access
from paddock.web.mounts import create_view_app
from paddock.web.read_store import ReadStore
from paddock.web.responses import POLICY

from .browser import HOST, TOKEN, Browser

SECRETS = ("/web/api/about", "/web/api/rollouts", "/web/api/live", "/web/api/server", "/web/api/nothing")


@pytest.mark.parametrize("path", SECRETS)
@pytest.mark.parametrize("sent", ["", "Bearer wrong", f"Basic {TOKEN}", "Bearer"])
def test_every_page_needs_the_token(path: str, sent: str, stranger: Browser) -> None:
    answer = stranger.get(path, authorization=sent)
    assert answer.status == 401
    assert answer.json()["error"]["hint"]


def test_posting_needs_the_token_too(stranger: Browser, ids: dict[str, str]) -> None:
    assert stranger.post(f"/web/api/rollouts/{ids['solve']}/abort").status == 401


def test_files_are_no_secret(stranger: Browser) -> None:
    assert stranger.get("/web/").status == 200
    assert stranger.get("/web/app.css").status == 200


@pytest.mark.parametrize("path", ["/", "/web"])
def test_the_way_in(path: str, stranger: Browser) -> None:
    answer = stranger.get(f"{path}?token=a%26b")
    assert answer.status == 307
    assert answer.headers["location"] == "/web/?token=a%26b"


def test_a_token_in_the_address_becomes_a_cookie(stranger: Browser) -> None:
    answer = stranger.get(f"/web/?token={quote(TOKEN, safe='')}")
    assert answer.status == 303
    assert answer.headers["location"] == "/web/"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert stranger.get("/web/api/about").status == 200
    assert stranger.get("/web/api/about", origin=f"http://{HOST}", sec_fetch_site="same-origin").status == 200


def test_a_wrong_token_in_the_address_becomes_nothing(stranger: Browser) -> None:
    answer = stranger.get("/web/?token=wrong")
    assert answer.status == 303
    assert "set-cookie" not in answer.headers


def test_the_page_may_bring_the_token_itself(stranger: Browser) -> None:
    assert stranger.post("/web/api/access", {"token": "wrong"}).status == 401
    for body in ({}, {"token": 5}, [], None):
        assert stranger.post("/web/api/access", body).status == 400
    assert not stranger.cookies
    assert stranger.post("/web/api/access", {"token": TOKEN}).json() == {"ok": True}
    assert stranger.get("/web/api/about").status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "http://localhost:8123"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "cross-site"},
        {"origin": "null"},
        {"origin": "https://evil.example"},
    ],
    ids=str,
)
def test_the_cookie_is_no_use_to_other_pages(headers: dict[str, str], stranger: Browser, ids: dict[str, str]) -> None:
    stranger.post("/web/api/access", {"token": TOKEN})
    assert stranger.get("/web/api/about", **headers).status in (401, 403)
    assert stranger.post(f"/web/api/rollouts/{ids['solve']}/abort", **headers).status in (401, 403)


def test_another_cookie_is_no_use(stranger: Browser) -> None:
    stranger.post("/web/api/access", {"token": TOKEN})
    [(name, value)] = stranger.cookies.items()
    for cookie in (f"{name}={value}x", f"{name}=", f"other={value}", f"{name}={TOKEN}", name):
        assert Browser(stranger.app, token=None).get("/web/api/about", cookie=cookie).status == 401


def test_two_pages_of_one_machine_keep_their_cookies_apart(recorded: Path, stranger: Browser) -> None:
    other = Browser(create_view_app(ReadStore(recorded), Access(token="another")), token=None)
    stranger.post("/web/api/access", {"token": TOKEN})
    other.post("/web/api/access", {"token": "another"})
    assert not set(stranger.cookies) & set(other.cookies)


def test_without_a_token_only_our_own_names_are_answered(recorded: Path) -> None:
    app = create_view_app(ReadStore(recorded), Access())
    assert Browser(app, token=None).get("/web/api/about").status == 200
    assert Browser(app, token=None, host="rebound.example").get("/web/api/about").status == 403
    assert Browser(app, token=None, host="rebound.example").get("/web/").status == 403


PATHS = (
    "/",
    "/web",
    "/web/",
    "/web/app.css",
    "/web/api/about",
    "/web/api/rollouts/none",
    "/web/none.js",
    "/web/?token=x",
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("has_access", [True, False])
def test_every_answer_says_what_may_run(path: str, has_access: bool, browser: Browser, stranger: Browser) -> None:
    headers = (browser if has_access else stranger).get(path).headers
    assert headers["content-security-policy"] == POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_the_policy_lets_nothing_in() -> None:
    assert "unsafe" not in POLICY
    assert POLICY.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "frame-ancestors 'none'" in POLICY


def test_files_are_sent_once(stranger: Browser) -> None:
    first = stranger.get("/web/", accept_encoding="gzip")
    assert first.headers["content-type"].startswith("text/html")
    assert first.headers["content-encoding"] == "gzip"
    again = stranger.get("/web/", if_none_match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")


def test_secrets_are_not_kept_by_browsers(browser: Browser) -> None:
    assert browser.get("/web/api/about").headers["cache-control"] == "no-store"
