"""What each call changed, as the page asks for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paddock.config import Access
from paddock.store import Store
from paddock.web.mounts import create_view_app
from paddock.web.read_store import ReadStore
from rollouts.snapshotted import save_snapshots

from .browser import TOKEN, Browser

ROLLOUT = "rollouts/r1234snapshots"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path) as opened:
        save_snapshots(opened, ({"a.txt": b"one\n"}, {"a.txt": b"<b>\n"}, {"a.txt": b"<b>\n"}))
        yield opened


@pytest.fixture
def browser(store: Store) -> Iterator[Browser]:
    app = create_view_app(ReadStore(store.path), Access(token=TOKEN))
    yield Browser(app)
    app.state.page.close()


def test_the_calls_are_listed_with_their_changes(browser: Browser) -> None:
    assert browser.api(ROLLOUT)["has_snapshots"]
    listed = browser.api(f"{ROLLOUT}/snapshots")
    rows = [(row["call"], row["gist"], [change["path"] for change in row["changes"]]) for row in listed["rows"]]
    assert rows == [("c0", "Answer 0.", ["a.txt"]), ("c1", "Answer 1.", [])]
    assert listed["left_out"] == {"venv": "why"}


def test_a_call_has_the_texts(browser: Browser) -> None:
    (change,) = browser.api(f"{ROLLOUT}/calls/c0/changes")
    assert (change["before"], change["after"], change["added"], change["removed"]) == ("one\n", "<b>\n", 1, 1)
    assert browser.get(f"/web/api/{ROLLOUT}/calls/c7/changes").status == 404


def test_deleted_snapshots_are_reported_as_deleted(store: Store, browser: Browser) -> None:
    store.expire_snapshots(0.0)
    assert browser.api(f"{ROLLOUT}/snapshots")["gone"]
    assert browser.get(f"/web/api/{ROLLOUT}/calls/c0/changes").status == 404


def test_a_shared_file_has_the_changes(browser: Browser) -> None:
    page = browser.get(f"/web/api/{ROLLOUT}/share").body.decode()
    assert f"{ROLLOUT}/calls/c0/changes" in page
    assert "<b>" not in page.partition("paddock-data")[2]
