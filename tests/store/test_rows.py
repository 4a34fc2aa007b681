"""Records: begun, updated, finished once, found again."""

from dataclasses import fields

import pytest

from paddock.capture.trace import Call, Event
from paddock.errors import StoreError
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord

FULL = RolloutRecord(
    rollout_id="rollout-full",
    task_id="task",
    task_hash="abc",
    instruction="Fix it. " * 100,
    model="policy",
    batch_id="batch",
    member=3,
    attempt=1,
    config={"temperature": 1.0, "nested": {"b": [None, True, 1, 1.5]}},
    metadata={"who": "me"},
    outcome=Outcome.TIMEOUT,
    reward=0.1 + 0.2,
    reward_parts={"tests": 0.5},
    error="too slow",
    started_at=1000.125,
    finished_at=1060.5,
    stage="verifier",
    stages={"agent": 50.0},
    call_count=3,
    level="tokens",
    exit_code=143,
    agent_session="ses_1",
    agent_log="a line with \udcff a broken byte\n" * 500,
    verifier_stdout="1 passed",
    verifier_stderr="\x1b[31mred\x1b[0m \0",
    test_exit_code=0,
    install_log="installed",
    proxy_log="POST",
    transcript=[{"info": {"role": "assistant"}, "parts": [{"text": "\U0001f600"}]}],
    workdir_files=["a.py", "b/c.py"],
    usage={"cpu_seconds": 1.25},
)


def begun(store: Store, rollout_id: str, **values: object) -> RolloutRecord:
    record = RolloutRecord(rollout_id, **{"task_id": "task", **values})  # type: ignore[arg-type]
    store.begin(record)
    return record


def finished(store: Store, rollout_id: str, outcome: Outcome = Outcome.OK, **values: object) -> RolloutRecord:
    record = begun(store, rollout_id, **values)
    record.outcome = outcome
    assert store.finish(record)
    return record


def test_every_field_of_a_record_comes_back(store: Store) -> None:
    store.begin(RolloutRecord("rollout-full", "task"))
    assert store.finish(FULL)
    assert store.get("rollout-full") == FULL


def test_a_record_runs_until_it_is_finished(store: Store) -> None:
    record = begun(store, "r-one", stage="setup")
    stored = store.get("r-one")
    assert stored == record
    assert not stored.finished


def test_an_update_changes_what_is_known_but_never_the_outcome(store: Store) -> None:
    record = begun(store, "r-one")
    record.stage, record.call_count, record.sandbox_id = "agent", 4, "box"
    record.outcome = Outcome.OK
    store.update(record)
    stored = store.get("r-one")
    assert stored is not None
    assert (stored.stage, stored.call_count, stored.sandbox_id, stored.outcome) == ("agent", 4, "box", None)


def test_the_first_outcome_stays(store: Store) -> None:
    record = finished(store, "r-one", reward=1.0, agent_log="first")
    late = RolloutRecord("r-one", "task", outcome=Outcome.CANCELLED, agent_log="second")
    assert not store.finish(late)
    late.outcome = None
    store.update(late)
    stored = store.get("r-one")
    assert stored is not None
    assert (stored.outcome, stored.reward, stored.agent_log) == (Outcome.OK, 1.0, "first")
    assert stored.started_at == record.started_at


def test_an_outcome_without_a_begin_is_kept(store: Store) -> None:
    assert store.finish(FULL)
    assert store.get(FULL.rollout_id) == FULL
    assert not store.finish(FULL)


def test_a_record_without_an_outcome_cannot_be_finished(store: Store) -> None:
    with pytest.raises(StoreError, match="no outcome"):
        store.finish(begun(store, "r-one"))


def test_an_id_begins_once(store: Store) -> None:
    begun(store, "r-one")
    with pytest.raises(StoreError, match="already"):
        begun(store, "r-one")


def test_an_update_of_an_unknown_rollout_is_an_error(store: Store) -> None:
    with pytest.raises(StoreError, match="no rollout nobody"):
        store.update(RolloutRecord("nobody", "task"))


def test_a_record_that_was_listed_cannot_wipe_the_logs(store: Store) -> None:
    begun(store, "r-one", agent_log="line", transcript=[{"a": 1}])
    store.update(store.list()[0])
    stored = store.get("r-one")
    assert stored is not None
    assert (stored.agent_log, stored.transcript) == ("line", [{"a": 1}])


def test_growing_logs_are_replaced(store: Store) -> None:
    record = begun(store, "r-one", agent_log="one")
    for text in ("one two", "one two", "one two three"):
        record.agent_log = text
        store.update(record)
        stored = store.get("r-one")
        assert stored is not None
        assert stored.agent_log == text


def test_listed_records_are_light(store: Store) -> None:
    store.finish(FULL)
    (listed,) = store.list()
    logs = {
        "agent_log",
        "verifier_stdout",
        "verifier_stderr",
        "install_log",
        "proxy_log",
        "transcript",
        "workdir_files",
    }
    for field in fields(RolloutRecord):
        if field.name in logs:
            assert not getattr(listed, field.name)
        elif field.compare:
            assert getattr(listed, field.name) == getattr(FULL, field.name)


def test_lists_and_counts_answer_the_same_filters(store: Store) -> None:
    finished(store, "r-1", task_id="a", agent="x", model="m", batch_id="b1", started_at=1.0)
    finished(store, "r-2", Outcome.AGENT, task_id="a", agent="y", model="m", batch_id="b1", started_at=2.0)
    finished(store, "r-3", task_id="b", agent="x", model="n", started_at=3.0)
    begun(store, "r-4", task_id="b", agent="x", model="m", batch_id="b2", started_at=4.0)
    for filters, names in (
        ({}, "4321"),
        ({"task_id": "a"}, "21"),
        ({"agent": "x"}, "431"),
        ({"agent": "x", "model": "m"}, "41"),
        ({"outcome": Outcome.OK}, "31"),
        ({"outcome": "agent"}, "2"),
        ({"batch_id": "b1", "outcome": "ok"}, "1"),
        ({"finished": True}, "321"),
        ({"finished": False}, "4"),
        ({"since": 2.0}, "432"),
        ({"task_id": "none"}, ""),
    ):
        records = store.list(**filters)  # type: ignore[arg-type]
        assert [record.rollout_id[-1] for record in records] == list(names), filters
        assert store.count(**filters) == len(names)  # type: ignore[arg-type]


def test_lists_have_pages_and_a_direction(store: Store) -> None:
    for number in range(7):
        begun(store, f"r-{number}", started_at=5.0)
    assert [record.rollout_id for record in store.list(limit=2, offset=1)] == ["r-5", "r-4"]
    assert [record.rollout_id for record in store.list(limit=2, newest_first=False)] == ["r-0", "r-1"]


def test_the_first_characters_of_an_id_are_enough(store: Store) -> None:
    begun(store, "abcd1111")
    begun(store, "abcd2222")
    begun(store, "abcd")
    begun(store, "wxyz%_11")
    for prefix, expected in (("abcd1", "abcd1111"), ("abcd", "abcd"), ("wxyz", "wxyz%_11")):
        stored = store.get(prefix)
        assert stored is not None
        assert stored.rollout_id == expected
    for prefix in ("wxy", "zzzz", "abcd3", "____"):
        assert store.get(prefix) is None


def test_latest_is_the_rollout_that_began_last(store: Store) -> None:
    assert store.get("latest") is None
    begun(store, "r-two")
    begun(store, "r-one")
    latest = store.get("latest")
    assert latest is not None
    assert latest.rollout_id == "r-one"


def test_an_ambiguous_prefix_names_the_candidates(store: Store) -> None:
    for number in range(9):
        begun(store, f"same-{number}")
    with pytest.raises(StoreError, match=r"same-0, same-1, .*, …") as caught:
        store.get("same")
    assert caught.value.hint is not None


def test_a_later_score_is_kept_beside_the_first(store: Store) -> None:
    finished(store, "r-one", reward=0.0)
    store.rescore("r-one", 1.0, None, {"tests": 1.0}, "fixed verifier")
    store.rescore("r-one", None, "verifier crashed", {}, "")
    first, second = store.scores("r-one")
    assert (first["reward"], first["parts"], first["note"]) == (1.0, {"tests": 1.0}, "fixed verifier")
    assert (second["reward"], second["reason"]) == (None, "verifier crashed")
    stored = store.get("r-one")
    assert stored is not None
    assert stored.reward == 0.0


def test_events_are_numbered_and_read_on_from_any_of_them(store: Store) -> None:
    begun(store, "r-one")
    begun(store, "r-two")
    events = [Event(float(number), "line", {"text": f"{number}", "odd": float("inf")}) for number in range(5)]
    assert [store.add_event("r-one", event) for event in events] == [1, 2, 3, 4, 5]
    assert store.add_event("r-two", Event(0.5, "stage")) == 1
    assert store.events("r-one") == list(enumerate(events, start=1))
    assert store.events("r-one", after=3) == [(4, events[3]), (5, events[4])]
    assert store.events("r-one", after=1, limit=1) == [(2, events[1])]


def test_what_belongs_to_no_rollout_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="no rollout"):
        store.add_event("nobody", Event(0.0, "line"))
    with pytest.raises(StoreError, match="no rollout"):
        store.calls("nobody")
    with pytest.raises(StoreError, match="no rollout"):
        store.rescore("nobody", 1.0, None, {}, "")


def test_the_calls_of_a_record_are_read_from_its_store(store: Store) -> None:
    record = begun(store, "rollout-1")
    call = Call("c0", 0, prompt_token_ids=[1, 2], completion_token_ids=[3], finish_reason="stop")
    store.save_call("rollout-1", call)
    read = store.get("rollout-1")
    assert read is not None
    assert record.calls == read.calls == [call]
    assert repr(record.calls) == "[<Call c0 agent text 2+1 tokens stop>]"


def test_a_record_without_a_store_says_so() -> None:
    with pytest.raises(StoreError, match="is in no store"):
        _ = RolloutRecord("rollout-1", "task").calls
