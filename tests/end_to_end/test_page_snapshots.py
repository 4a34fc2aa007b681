"""The files of a rollout with snapshots, in a real browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from paddock.store import Store
from rollouts.snapshotted import save_snapshots

from .pages import a_browser, a_page, paddock

pytestmark = pytest.mark.end_to_end
HOSTILE = "<img src=x onerror=alert(1)>\n"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with Store.open(tmp_path) as store:
        save_snapshots(store, ({"a.txt": b"one\n"}, {"a.txt": HOSTILE.encode()}, {"a.txt": HOSTILE.encode()}))
    with (
        paddock("view", "--store", str(tmp_path), "--no-open") as url,
        a_browser() as browser,
        a_page(browser, url) as opened,
    ):
        yield opened


def test_a_call_shows_what_it_changed_once_it_is_opened(page: Page) -> None:
    page.evaluate("location.hash = '#/rollouts/r1234snapshots/files'")
    changes = page.locator(".call-changes")
    expect(changes).to_contain_text("No changes: c1")
    expect(changes).to_contain_text("1 path was not saved")
    expect(changes.locator(".diff")).to_have_count(0)
    changes.locator("summary").first.click(position={"x": 4, "y": 8})
    expect(changes.locator(".diff-gone")).to_contain_text("one")
    expect(changes.locator(".diff-new")).to_contain_text("<img src=x")
    expect(changes.locator("img")).to_have_count(0)
