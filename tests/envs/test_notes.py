import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paddock import SyncClient
from paddock.envs.notes import Notes
from paddock.errors import InvalidToolArguments
from paddock.targets import load_target


@pytest.fixture
def notes() -> Iterator[Notes]:
    with closing(Notes()) as notes:
        yield notes


def titles(notes: Notes) -> list[str]:
    return [note["title"] for note in notes.list_notes()]


def test_it_is_shipped() -> None:
    assert load_target("notes") == (Notes, "notes")


def test_it_begins_with_one_note(notes: Notes) -> None:
    assert [(note["id"], note["title"]) for note in notes.list_notes()] == [(1, "welcome")]


def test_notes_are_added(notes: Notes) -> None:
    assert notes.call_tool("add_note", {"title": "a"}) == {"id": 2}
    assert notes.call_tool("add_note", {"title": "b", "body": "text"}) == {"id": 3}
    assert notes.list_notes()[-1] == {"id": 3, "title": "b", "body": "text"}
    with pytest.raises(InvalidToolArguments):
        notes.call_tool("add_note", {"body": "no title"})


def test_a_reset_forgets_them(notes: Notes) -> None:
    notes.add_note("a")
    notes.reset()
    assert titles(notes) == ["welcome"]
    assert notes.add_note("b") == {"id": 2}


def test_reading_is_marked_as_safe() -> None:
    options = {name: spec.options for name, spec in Notes.tools.items()}
    assert options["list_notes"].read_only
    assert not options["add_note"].read_only


def test_a_database_can_be_looked_into_while_it_is_used(notes: Notes, tmp_path: Path) -> None:
    path = tmp_path / "current.sqlite"
    notes.add_note("in memory")
    notes.open_database(str(path))
    notes.reset()
    notes.add_note("in the file")
    with closing(sqlite3.connect(path)) as connection:
        result = connection.execute("SELECT id, title, body FROM notes").fetchall()
        assert [row[1] for row in result] == ["welcome", "in the file"]
        with connection:
            connection.execute("INSERT INTO notes (title) VALUES ('from outside')")
    assert titles(notes) == ["welcome", "in the file", "from outside"]


def test_the_page_shows_notes_and_trusts_none(notes: Notes) -> None:
    notes.add_note("<script>alert(1)</script>", "a & b $notes")
    page = notes.page()
    assert "welcome" in page
    assert "<script>" not in page
    assert "a &amp; b $notes" in page
    assert 'name="tool" value="add_note"' in page


def test_instances_share_nothing() -> None:
    with closing(Notes()) as one, closing(Notes()) as two:
        one.add_note("mine")
        assert titles(two) == ["welcome"]


def test_it_is_served_like_any_other() -> None:
    with SyncClient(Notes) as client:
        client.reset()
        assert [tool.name for tool in client.tools()] == ["add_note", "list_notes"]
        client.call_tool("add_note", title="served")
        result = client.call_tool("list_notes")
        assert "served" in str(result)
