"""Tags of rollouts: added, removed, searched by, and deleted with their rollout."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paddock.errors import ConfigError, StoreError
from paddock.store import Store, search
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path) as opened:
        for name in ("r-one", "r-two"):
            opened.finish(RolloutRecord(name, "task", outcome=Outcome.OK))
        yield opened


def test_tags_are_added_and_removed(store: Store) -> None:
    assert store.change_tags(["r-one", "r-two"], add=["good", "again"]) == {
        "r-one": ["again", "good"],
        "r-two": ["again", "good"],
    }
    assert store.change_tags(["r-one"], add=["good"], remove=["again", "never-there"]) == {"r-one": ["good"]}
    assert store.tags("r-one") == ["good"]
    assert [record.rollout_id for record in store.list(tag="again")] == ["r-two"]
    assert store.count(tag="good") == 2
    assert store.query(search.facets)["tags"] == [{"name": "good", "count": 2}, {"name": "again", "count": 1}]


def test_a_changed_tag_is_a_change_of_the_rollout(store: Store) -> None:
    before = store.query(search.latest_change)
    store.change_tags(["r-one"], add=["good"])
    assert len(store.query(search.changed_since, before, 10)) == 1


@pytest.mark.parametrize("tag", ["", "two words", "a,b", "-minus", "+plus", "x" * 61, "tab\t"])
def test_what_is_no_tag_is_refused(store: Store, tag: str) -> None:
    with pytest.raises(ConfigError, match="is no tag"):
        store.change_tags(["r-one", "r-two"], add=["fine", tag])
    assert store.tags("r-one") == []


def test_all_rollouts_get_the_tags_or_none(store: Store) -> None:
    with pytest.raises(StoreError, match="there is no rollout r-gone"):
        store.change_tags(["r-one", "r-gone"], add=["good"])
    assert store.tags("r-one") == []


def test_a_deleted_rollout_has_no_tags(store: Store) -> None:
    store.change_tags(["r-one"], add=["good"])
    store.delete(["r-one"])
    assert store.count(tag="good") == 0
    assert store.query(search.facets)["tags"] == []
