"""Full-text search: what is found, what is not, and that the index follows what is deleted."""

from pathlib import Path
from typing import Any

import pytest

from paddock.capture.trace import Call
from paddock.store import Store, rows, search, transcripts
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.store.search import Search
from paddock.store.text_query import match_expression, split_words


def finish(store: Store, name: str, messages: list[dict[str, Any]], answer: str = "Done.", **fields: Any) -> None:
    record = RolloutRecord(name, "task", instruction="Repair the counter.", **fields)
    store.begin(record)
    message = {"role": "assistant", "content": answer}
    store.save_call(name, Call("c0", 0, request={"messages": messages}, message=message))
    record.outcome = Outcome.OK
    store.finish(record)


def found(store: Store, words: str) -> list[str]:
    keys = store.query(search.page, Search(words=words), order="asc")
    return [store.query(rows.head, key)["rollout_id"] for key in keys]  # type: ignore[index]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path) as opened:
        arguments = '{"command": "pytest\\ntests/test_counter.py"}'
        tool_call = {"id": "t0", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        first = [
            {"role": "system", "content": "You are a zealous assistant."},
            {"role": "assistant", "content": None, "tool_calls": [tool_call]},
            {"role": "tool", "tool_call_id": "t0", "content": "ModuleNotFoundError: No module named 'yaml'"},
        ]
        finish(opened, "r-first", first, "I install PyYAML.", verifier_stdout="1 failed, 3 passed")
        finish(opened, "r-second", [{"role": "user", "content": "No news from the yaml module, named or not"}])
        yield opened


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("modulenotfounderror", ["r-first"]),
        ("ModuleNot", ["r-first"]),
        ("named yaml", ["r-first", "r-second"]),
        ('"no module named" ', ["r-first"]),
        ("tests/test_counter.py", ["r-first"]),
        ("counter.py", ["r-first"]),
        ("PyYAML", ["r-first"]),
        ('"3 passed"', ["r-first"]),
        ("repair", ["r-first", "r-second"]),
        ("r-second", ["r-second"]),
        ("zealous", []),
        ("yaml nowhere", []),
        ("NEAR(", []),
        ('"unclosed', []),
    ],
)
def test_words_are_found_in_transcripts_and_names(store: Store, words: str, names: list[str]) -> None:
    assert found(store, words) == names


def test_a_snippet_shows_the_whole_query_where_it_stands(store: Store) -> None:
    key = store.query(rows.key_of, "r-first")
    assert key is not None
    snippet = store.query(transcripts.snippet, key, "no module named")
    assert snippet is not None
    assert "No module named 'yaml'" in snippet
    assert store.query(transcripts.snippet, key, "counter.py:") is not None
    assert store.query(transcripts.snippet, key, "nowhere") is None


def test_a_deleted_rollout_leaves_the_index(store: Store) -> None:
    store.delete(["r-first"])
    assert found(store, "yaml") == ["r-second"]
    matching = "SELECT count(*) FROM transcript_index WHERE transcript_index MATCH 'modulenotfounderror'"
    assert store.query(lambda connection: connection.execute(matching).fetchone()[0]) == 0


def test_rollouts_of_an_older_store_are_indexed_later(store: Store) -> None:
    with store._database.write() as connection:
        for (key,) in connection.execute("SELECT rollout FROM transcripts").fetchall():
            transcripts.delete(connection, key)
    assert found(store, "yaml") == []
    assert store.query(transcripts.count_pending) == 2
    before = store.index_transcripts()
    assert before is not None
    assert store.index_transcripts(before) is store.index_transcripts() is None
    assert found(store, "yaml") == ["r-first", "r-second"]


def test_a_running_rollout_is_not_indexed(store: Store) -> None:
    store.begin(RolloutRecord("r-running", "task", instruction="Repair it."))
    assert store.index_transcripts() is None


def test_images_and_long_data_are_left_out() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "a picture"}, image, {"type": "text", "text": "x" * 600}]
    assert list(transcripts.texts_of({"role": "user", "content": content})) == ["a picture"]


def test_a_query_is_words_and_phrases() -> None:
    assert split_words('one "two three" -- four') == ["one", "two three", "four"]
    assert match_expression('one "two three"') == '"one" "two three"'
    assert match_expression("one fou") == '"one" "fou"*'
    assert match_expression("one fo") == '"one" "fo"'
    assert match_expression("one ") == '"one"'
    assert match_expression("--") is None
