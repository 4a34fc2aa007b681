"""From a store to a file: everything that may be trained on, nothing that may not, and the reason for it."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.errors import ConfigError, StoreError
from paddock.rollouts.export import FORMS, load_form
from paddock.rollouts.export.policy import Policy
from paddock.rollouts.export.samples import Sample, samples
from paddock.rollouts.export.stream import Finding, check, chosen, export, rollouts
from paddock.rollouts.outcome import Outcome
from paddock.rollouts.record import RolloutRecord
from paddock.rollouts.store import Store
from paddock.rollouts.store.rows import Filters
from paddock.rollouts.trace import Call
from rollouts.export.rollouts import call, conversation, forked, record


def keep(store: Store, about: RolloutRecord, calls: list[Call]) -> None:
    outcome, about.outcome = about.outcome, None
    store.begin(about)
    for each in calls:
        store.save_call(about.rollout_id, each)
    if outcome is not None:
        about.outcome = outcome
        store.finish(about)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "store") as kept:
        aborted = conversation(1)
        aborted[0].aborted = True
        keep(kept, record("r0", started_at=1.0), conversation(3))
        keep(kept, record("r1", started_at=2.0, batch_id="b2"), forked())
        keep(kept, record("r2", reward=None, reward_reason="it hung", started_at=3.0), conversation(2))
        keep(kept, record("r3", outcome=None, started_at=4.0), conversation(2))
        keep(kept, record("r4", reward=0.0, started_at=5.0), aborted)
        yield kept


def lines(store: Store, form: str, **options: Any) -> list[dict[str, Any]]:
    out = io.BytesIO()
    export(store, form, out, **options)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_samples_are_those_of_whole_calls(store: Store) -> None:
    slim = {
        about.rollout_id: list(samples(about, calls)) for about, calls in rollouts(store, chosen(store), whole=False)
    }
    whole = {
        about.rollout_id: list(samples(about, calls)) for about, calls in rollouts(store, chosen(store), whole=True)
    }
    assert list(slim) == ["r0", "r1", "r2", "r4"]
    assert slim == whole
    assert [len(found) for found in slim.values()] == [1, 3, 0, 0]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "parquet"])
def test_a_file_has_what_the_form_makes_of_each_rollout(store: Store, form: str) -> None:
    made = [
        document
        for about, calls in rollouts(store, chosen(store), whole=True)
        for document in load_form(form).export(about, calls, Policy())
    ]
    assert lines(store, form) == json.loads(json.dumps(made))


def test_parquet_has_the_same_rows_as_the_samples(store: Store, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    report = export(store, "parquet", tmp_path / "out.parquet")
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    expected = [
        document
        for about, calls in rollouts(store, chosen(store), whole=False)
        for document in load_form("parquet").export(about, calls, Policy())
    ]
    assert rows == expected
    assert (report.rollouts, report.documents) == (2, 4)
    assert report.tokens == sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)


def test_parquet_flags_what_nobody_scored(store: Store, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    export(store, "parquet", tmp_path / "out.parquet", policy=Policy(unscored="flag"))
    rows = {row["rollout_id"]: row for row in parquet.read_table(tmp_path / "out.parquet").to_pylist()}
    assert rows["r2"]["reward"] is None
    assert json.loads(rows["r2"]["metadata"])["unscored"] == "it hung"


def test_parquet_of_nothing_is_an_empty_table(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    with Store.open(tmp_path / "empty") as empty:
        export(empty, "parquet", tmp_path / "out.parquet")
    assert parquet.read_table(tmp_path / "out.parquet").num_rows == 0


def test_parquet_goes_to_a_file_only(store: Store) -> None:
    with pytest.raises(ConfigError):
        export(store, "parquet", io.BytesIO())


def test_the_report_balances_and_says_why(store: Store) -> None:
    report = export(store, "trl", io.BytesIO())
    assert (report.rollouts, report.documents) == (2, 4)
    assert report.left_out == {
        "it has no reward: it hung": 1,
        "none of its calls can be trained on: the call was aborted": 1,
    }


def test_rollouts_are_chosen_by_id_or_by_what_they_are(store: Store) -> None:
    def named(keys: list[int]) -> list[str]:
        return [about.rollout_id for about, _ in rollouts(store, keys, whole=False)]

    assert named(chosen(store, ["r1", "r0"])) == ["r1", "r0"]
    assert named(chosen(store, filters=Filters(batch_id="b2", finished=True))) == ["r1"]
    assert named(chosen(store, filters=Filters(outcome=Outcome.TASK))) == []
    with pytest.raises(StoreError):
        chosen(store, ["r9"])


def test_a_check_tells_what_is_left_out(store: Store) -> None:
    told: list[Finding] = []
    report = check(store, "jsonl", tell=told.append)
    assert report.wrong == 0
    assert [(each.rollout_id, each.kind, each.text) for each in told] == [
        ("r1", "call", "c4: its answer did not reach the agent completely, and the agent asked again"),
        ("r1", "call", "c6: its role is title"),
        ("r2", "left out", "it has no reward: it hung"),
        ("r4", "left out", "none of its calls can be trained on: the call was aborted"),
    ]


def test_a_check_notices_what_is_wrong(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as kept:
        keep(kept, record("bad1"), [call(0, [1], [2, 3], logprobs=[0.75, -1.0])])
        told: list[Finding] = []
        for form in ("trl", "skyrl", "verl", "prime", "verifiers", "slime", "tinker", "openenv", "jsonl", "parquet"):
            assert check(kept, form, tell=told.append).wrong == 1, form
    assert all("no probability is above 1" in each.text for each in told)


def test_a_package_that_refuses_is_heard(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(document: dict[str, Any]) -> None:
        raise ValueError("no such field")

    monkeypatch.setattr(load_form("trl"), "accept", refuse)
    told: list[Finding] = []
    assert check(store, "trl", tell=told.append).wrong == 4
    assert "trl does not take it: ValueError: no such field" in {each.text for each in told}


TOKENS = st.lists(st.integers(1, 4), min_size=1, max_size=5)
TREES = st.lists(st.tuples(st.integers(0, 6), TOKENS, TOKENS, st.integers(0, 2)), min_size=1, max_size=7)


@settings(max_examples=40, deadline=None)
@given(TREES)
def test_what_is_read_in_bulk_is_what_was_saved(tmp_path_factory: Any, tree: list[Any]) -> None:
    calls: list[Call] = []
    for index, (parent, added, sampled, cut) in enumerate(tree):
        before: list[int] = []
        if calls and parent:
            base = calls[parent % len(calls)]
            before = base.prompt_token_ids + (base.completion_token_ids if cut == 0 else [])
            before = before[: len(before) - cut]
        calls.append(call(index, [*before, *added], sampled))
    with Store.open(tmp_path_factory.mktemp("store")) as kept:
        keep(kept, record("r1"), calls)
        ((about, slim),) = rollouts(kept, chosen(kept), whole=False)
        assert [list(each.prompt_token_ids) for each in slim] == [each.prompt_token_ids for each in calls]
        assert [list(each.completion_token_ids) for each in slim] == [each.completion_token_ids for each in calls]
        found: list[Sample] = list(samples(about, slim))
        assert found == list(samples(about, calls))


def test_ids_that_cannot_be_packed_are_read_too(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as kept:
        keep(kept, record("r1"), [call(0, [1, 2**40], [5, 6])])
        ((_, (slim,)),) = rollouts(kept, chosen(kept), whole=False)
        assert list(slim.prompt_token_ids) == [1, 2**40]
        (line,) = lines(kept, "trl")
        assert line["prompt_ids"] == [1, 2**40]
