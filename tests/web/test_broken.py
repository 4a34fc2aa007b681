"""The page and its command over a store that cannot be read."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.processes import paddock
from paddock.config import Access
from paddock.store.packing import UNCOMPRESSED
from paddock.web.mounts import create_view_app
from paddock.web.read_store import ReadStore
from recorded import unpack

from .browser import TOKEN, Browser


def overwritten(file: Path) -> None:
    file.write_bytes(b"no database at all" * 1000)


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def damaged(file: Path) -> None:
    """One value in it was written over."""
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE rollouts SET head = x'28b52ffd0123456789'")
    connection.close()


def garbled(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE rollouts SET head = ?", (UNCOMPRESSED + b'{"',))
    connection.close()


BROKEN = {
    overwritten: "file is not a database",
    truncated: "database disk image is malformed",
    damaged: "cannot be read",
    garbled: "cannot be read",
}
breaks = pytest.mark.parametrize(("spoil", "message"), BROKEN.items(), ids=[each.__name__ for each in BROKEN])


@breaks
@pytest.mark.parametrize("words", [["view", "--no-open"], ["serve", "counter", "--web", "--port", "0"]])
def test_the_command_says_what_is_wrong_and_ends(
    tmp_path: Path, spoil: Callable[[Path], None], message: str, words: list[str]
) -> None:
    spoil(unpack(tmp_path) / "store.db")
    done = paddock(*words, "--store", str(tmp_path))
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert message in error
    assert hint.startswith("hint: store.db is ")


@breaks
@pytest.mark.parametrize("path", ["rollouts", "groups", "rollouts/{id}"])
def test_the_page_gets_the_reason(
    tmp_path: Path, spoil: Callable[[Path], None], message: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = unpack(tmp_path) / "store.db"
    connection = sqlite3.connect(file)
    (name,) = connection.execute("SELECT rollout_id FROM rollouts").fetchone()
    connection.close()
    spoil(file)
    app = create_view_app(ReadStore(tmp_path), Access(token=TOKEN))
    answer = Browser(app).get(f"/web/api/{path.format(id=name)}")
    app.state.page.close()
    assert answer.status == 503
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["hint"].startswith("store.db is ")
    assert caplog.text == ""
