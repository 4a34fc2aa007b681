"""The routes about training: which streams there are, and the figures of one."""

from pathlib import Path

from paddock.config import Access
from paddock.store import Store
from paddock.train.stream_state import StreamState
from paddock.web.mounts import create_view_app
from paddock.web.read_store import ReadStore
from train.test_training_view import write

from .browser import TOKEN, Browser


def opened(folder: Path) -> Browser:
    Store.open(folder).close()
    return Browser(create_view_app(ReadStore(folder), Access(token=TOKEN)))


def test_the_page_shows_the_figures_of_a_stream(tmp_path: Path) -> None:
    browser = opened(tmp_path)
    write(tmp_path).close()
    assert browser.api("about")["parts"]["training"]
    assert [each["name"] for each in browser.api("streams")["streams"]] == ["run"]
    view = browser.api("streams/run")
    assert view["versions"][0]["reward"]["mean"] == 0.5
    assert [(each["name"], len(each["rewards"])) for each in view["sources"]] == [("games", 2)]
    browser.app.state.page.close()


def test_the_name_of_a_stream_may_have_a_slash(tmp_path: Path) -> None:
    browser = opened(tmp_path)
    state = StreamState(tmp_path, "runs/7")
    state.open({}, 3)
    state.close()
    assert browser.api("streams/runs%2F7")["version"] == 3
    browser.app.state.page.close()


def test_there_is_no_training_without_a_stream(tmp_path: Path) -> None:
    browser = opened(tmp_path)
    assert not browser.api("about")["parts"]["training"]
    assert browser.api("streams") == {"streams": []}
    assert browser.get("/web/api/streams/run").status == 404
    browser.app.state.page.close()
