from collections.abc import Iterator
from pathlib import Path

import pytest

from paddock.config import Access
from paddock.store import Store
from paddock.web.mounts import create_view_app
from paddock.web.read_store import ReadStore
from recorded import unpack

from .browser import TOKEN, Browser


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with rollouts of every kind, to be read only."""
    return unpack(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="session")
def store(recorded: Path) -> Iterator[Store]:
    with Store.open(recorded, read_only=True) as opened:
        yield opened


@pytest.fixture(scope="session")
def browser(recorded: Path) -> Iterator[Browser]:
    """With the token, over the recorded store."""
    app = create_view_app(ReadStore(recorded), Access(token=TOKEN))
    yield Browser(app)
    app.state.page.close()


@pytest.fixture
def stranger(browser: Browser) -> Browser:
    """Without the token."""
    return Browser(browser.app, token=None)


@pytest.fixture(scope="session")
def ids(store: Store) -> dict[str, str]:
    """A rollout of each task, the first of those with several."""
    return {record.task_id: record.rollout_id for record in store.list()}
