"""Finding rollouts: search in transcripts, tags, exports, batches, causes, and rewards by batch and version."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddock.config import Access
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.web.mounts import create_view_app
from paddock.web.read_store import ReadStore
from recorded import unpack

from .browser import TOKEN, Browser


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return unpack(tmp_path)


@pytest.fixture
def own(folder: Path) -> Iterator[Browser]:
    """Over a store that may be written."""
    app = create_view_app(ReadStore(folder), Access(token=TOKEN))
    yield Browser(app)
    app.state.page.close()


def index(folder: Path) -> None:
    with Store.open(folder) as store:
        before = store.index_transcripts()
        while before is not None:
            before = store.index_transcripts(before)


def test_transcripts_are_searched_and_the_place_is_shown(own: Browser, folder: Path) -> None:
    index(folder)
    answer = own.api("rollouts?q=%22frog+jumps%22")
    assert {row["task_id"] for row in answer["rows"]} == {"haiku", "subagent"}
    assert "A frog jumps into the pond" in answer["rows"][0]["match"]
    assert answer["not_indexed"] == 0
    assert own.api("stats?q=%22frog+jumps%22")["total"] == answer["total"] == 2
    assert own.api("rollouts?q=frog&task=subagent")["total"] == 1


def test_an_older_store_says_what_is_not_searchable_yet(own: Browser) -> None:
    answer = own.api("rollouts?q=frog")
    assert (answer["total"], answer["not_indexed"]) == (0, own.api("stats")["total"])
    assert own.api("rollouts")["not_indexed"] == 0


@pytest.mark.parametrize("words", ["%22", "AND", "NEAR%28", "a%2A", "text%3Ax", "%00", "-", "%22a%22%22b"])
def test_no_words_break_the_search(words: str, own: Browser, folder: Path) -> None:
    index(folder)
    assert own.get(f"/web/api/rollouts?q={words}").status == 200


def test_tags_are_changed_shown_and_filtered_by(own: Browser) -> None:
    names = [row["rollout_id"] for row in own.api("rollouts?limit=2")["rows"]]
    answer = own.post("/web/api/tags", {"rollouts": names, "add": ["look-again"], "remove": []})
    assert answer.json() == {"tags": {name: ["look-again"] for name in names}}
    own.post("/web/api/tags", {"rollouts": names[:1], "add": [], "remove": ["look-again"]})
    [row] = own.api("rollouts?tag=look-again")["rows"]
    assert (row["rollout_id"], row["tags"]) == (names[1], ["look-again"])
    assert own.api("facets")["tags"] == [{"name": "look-again", "count": 1}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"rollouts": "r"}, "this is no change of tags"),
        ([], "this is no change of tags"),
        ({"rollouts": [], "add": [1], "remove": []}, "this is no change of tags"),
        ({"rollouts": ["r-none"], "add": ["x"], "remove": []}, "there is no rollout r-none"),
    ],
)
def test_a_wrong_change_of_tags_is_refused(body: Any, message: str, own: Browser) -> None:
    answer = own.post("/web/api/tags", body)
    assert 400 <= answer.status < 500
    assert message in answer.json()["error"]["message"]


def test_a_stranger_changes_no_tags(stranger: Browser) -> None:
    assert stranger.post("/web/api/tags", {"rollouts": [], "add": [], "remove": []}).status == 401


def test_filtered_rollouts_are_exported(browser: Browser) -> None:
    forms = {form["name"] for form in browser.api("forms")["forms"]}
    assert {"jsonl", "replay"} <= forms
    answer = browser.get("/web/api/export?task=solve&outcome=ok&form=jsonl")
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert {line["task_id"] for line in lines} == {"solve"}
    assert 'filename="rollouts.jsonl"' in answer.headers["content-disposition"]
    refused = browser.get("/web/api/export?task=unlucky&form=jsonl&outcome=model")
    assert refused.status == 409
    assert browser.get("/web/api/export?form=none").status == 400


def test_batches_show_their_progress_and_causes(browser: Browser, store: Store) -> None:
    answer = browser.api("batches")
    [first] = browser.api("batches?batch=b-first")["batches"]
    assert first in answer["batches"]
    assert first["count"] == store.count(batch_id="b-first") == first["done"]
    assert (first["size"], first["running"], first["tasks"]) == (None, 0, 2)
    causes = browser.api("causes")
    broken = sum(record.outcome is not Outcome.OK for record in store.list())
    assert causes["total"] == broken == sum(cause["count"] for cause in causes["causes"])
    timeout = next(cause for cause in causes["causes"] if cause["outcome"] == "timeout")
    assert browser.api(f"rollouts?outcome=timeout&cause={timeout['cause']}")["total"] == timeout["count"]


def test_rewards_are_drawn_by_time_batch_and_version(browser: Browser, tmp_path: Path) -> None:
    by_time = browser.api("learning")
    scored = browser.api("stats")["scored"]
    assert sum(point["scored"] for point in by_time["lines"][0]["points"]) == scored
    by_batch = browser.api("learning?by=batch&split=task&batch=b-first")
    assert by_batch["places"] == ["b-first"]
    [solve] = [line for line in by_batch["lines"] if line["name"] == "solve"]
    assert solve["points"] == [{"place": 0, "mean": 1.0, "ci": solve["points"][0]["ci"], "scored": 3, "count": 3}]
    assert browser.api("learning?by=weights")["places"] == []
    assert browser.get("/web/api/learning?by=colour").status == 400
    assert browser.get("/web/api/learning?split=colour").status == 400


def test_rollouts_are_filtered_by_weight_version(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        for version in ("3", "4"):
            record = RolloutRecord(f"r-{version}", "task", weight_version=version, outcome=Outcome.OK, reward=1.0)
            store.finish(record)
    app = create_view_app(ReadStore(tmp_path), Access(token=TOKEN))
    own = Browser(app)
    assert [row["rollout_id"] for row in own.api("rollouts?weights=4")["rows"]] == ["r-4"]
    assert own.api("learning?by=weights")["places"] == ["3", "4"]
    app.state.page.close()
