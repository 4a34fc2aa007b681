"""From a store to a file: everything that may be trained on, nothing that may not, and the reason for it."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.rollouts import call, record, save
from paddock.errors import StoreError
from paddock.export import FORMS, load_form, trl
from paddock.export.policy import Policy
from paddock.export.samples import Sample, samples
from paddock.export.stream import ExportFinding, check, export, read_rollouts, select_keys
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.search import Search

if TYPE_CHECKING:
    from paddock.capture.trace import Call


def lines(store: Store, form: str, **options: Any) -> list[dict[str, Any]]:
    out = io.BytesIO()
    export(store, form, out, **options)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_samples_are_those_of_whole_calls(store: Store) -> None:
    slim = {
        about.rollout_id: list(samples(about, calls))
        for about, calls in read_rollouts(store, select_keys(store), whole=False)
    }
    whole = {
        about.rollout_id: list(samples(about, calls))
        for about, calls in read_rollouts(store, select_keys(store), whole=True)
    }
    assert list(slim) == ["r0", "r1", "r2", "r4"]
    assert slim == whole
    assert [len(each) for each in slim.values()] == [1, 3, 0, 0]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "parquet"])
def test_a_file_has_what_the_form_makes_of_each_rollout(store: Store, form: str) -> None:
    made = [
        document
        for about, calls in read_rollouts(store, select_keys(store), whole=True)
        for document in load_form(form).export(about, calls, Policy())
    ]
    assert lines(store, form) == json.loads(json.dumps(made))


def test_the_report_counts_all_rollouts_with_reasons(store: Store) -> None:
    report = export(store, "trl", io.BytesIO())
    assert (report.rollouts, report.documents) == (2, 4)
    assert report.left_out == {
        "it has no reward: it hung": 1,
        "none of its calls can be trained on: the call was aborted": 1,
    }


def test_rollouts_are_selected_by_id_or_by_filters(store: Store) -> None:
    def named(keys: list[int]) -> list[str]:
        return [about.rollout_id for about, _ in read_rollouts(store, keys, whole=False)]

    assert named(select_keys(store, ["r1", "r0"])) == ["r1", "r0"]
    assert named(select_keys(store, matching=Search.of(batch_id="b2", finished=True))) == ["r1"]
    assert named(select_keys(store, matching=Search.of(outcome=Outcome.TASK))) == []
    with pytest.raises(StoreError):
        select_keys(store, ["r9"])


def test_a_check_reports_what_is_left_out(store: Store) -> None:
    findings: list[ExportFinding] = []
    report = check(store, "jsonl", on_finding=findings.append)
    assert report.wrong == 0
    assert [(each.rollout_id, each.kind, each.text) for each in findings] == [
        ("r1", "call", "c4: its answer did not reach the agent completely, and the agent asked again"),
        ("r1", "call", "c6: its role is title"),
        ("r2", "left out", "it has no reward: it hung"),
        ("r4", "left out", "none of its calls can be trained on: the call was aborted"),
    ]


def test_a_check_reports_what_is_wrong(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        save(store, record("bad1"), [call(0, [1], [2, 3], logprobs=[0.75, -1.0])])
        findings: list[ExportFinding] = []
        for form in ("trl", "skyrl", "verl", "prime", "verifiers", "slime", "tinker", "openenv", "jsonl", "parquet"):
            assert check(store, form, on_finding=findings.append).wrong == 1, form
    assert all("no probability is above 1" in each.text for each in findings)


def test_a_rejection_by_the_package_is_reported(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(document: dict[str, Any]) -> None:
        raise ValueError("no such field")

    monkeypatch.setattr(trl, "FORM", replace(trl.FORM, validate=reject))
    findings: list[ExportFinding] = []
    assert check(store, "trl", on_finding=findings.append).wrong == 4
    assert "trl does not take it: ValueError: no such field" in {each.text for each in findings}


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
    with Store.open(tmp_path_factory.mktemp("store")) as store:
        save(store, record("r1"), calls)
        ((about, slim),) = read_rollouts(store, select_keys(store), whole=False)
        assert [list(each.prompt_token_ids) for each in slim] == [each.prompt_token_ids for each in calls]
        assert [list(each.completion_token_ids) for each in slim] == [each.completion_token_ids for each in calls]
        from_store: list[Sample] = list(samples(about, slim))
        assert from_store == list(samples(about, calls))


def test_ids_that_cannot_be_packed_are_read_too(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        save(store, record("r1"), [call(0, [1, 2**40], [5, 6])])
        ((_, (slim,)),) = read_rollouts(store, select_keys(store), whole=False)
        assert list(slim.prompt_token_ids) == [1, 2**40]
        (line,) = lines(store, "trl")
        assert line["prompt_ids"] == [1, 2**40]
