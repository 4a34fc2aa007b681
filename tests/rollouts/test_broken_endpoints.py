"""Endpoints that list their model and then fail: what a command agent and the loop are charged with."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paddock.export.samples import samples
from paddock.limits import RolloutTimeouts
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from rollouts.loop.fake_session import FakeSession, played, turns
from rollouts.played import LIMITS, SOLVES, a_task, needs_bwrap, run, speaker, spoken

AT_ONCE = "sys.exit(converse())"
STUBBORN = "converse(tries=10**6); import time; time.sleep(60)"
"""It asks again for ever, and ends only when it is stopped."""
LEAVING = """
plain = http.client.HTTPConnection
http.client.HTTPConnection = lambda host, port, timeout: plain(host, port, timeout=0.4)
sys.exit(converse())
"""
"""It hangs up by itself on an endpoint that keeps silent."""
SAYS = {"tool": "say", "arguments": {"word": "hello"}}
LONG = {"text": "word " * 400}
ALWAYS = {"times": 10**6}
BROKEN: dict[str, dict[str, Any]] = {
    "never answers": {"hang": 600, **ALWAYS},
    "endless 429": {"status": 429, "retry_after": 0.2, **ALWAYS},
    "endless 503": {"status": 503, **ALWAYS},
    "stalls after tokens": {"stall_after": 3, **ALWAYS},
    "cuts its stream": {"cut_after": 3, **ALWAYS},
    "malformed from the start": {"malformed": True, **ALWAYS},
    "malformed after tokens": {"malformed": True, "cut_after": 3, **ALWAYS},
    "an error in the stream": {"error_chunk": "out of memory", **ALWAYS},
    "closes the socket": {"close": True, **ALWAYS},
    "a lasting 400": {"status": 400, "message": "no such thing", **ALWAYS},
}


def ended(store: Store, fault: dict[str, Any], agent: str, *, seconds: float = 1.5, **options: Any) -> RolloutRecord:
    script = {**SOLVES, **options.pop("script", {}), "faults": [fault] if fault else []}
    task = a_task(timeouts=RolloutTimeouts(agent=seconds, verifier=10), sandbox=LIMITS)
    record, _ = run(spoken(store, script, speaker(agent), task=task, **options))
    return record


def unscored(store: Store, record: RolloutRecord) -> bool:
    """Nothing of it may be trained on, and it is run again in a batch."""
    exported = list(samples(record, store.calls(record.rollout_id)))
    return record.reward is None and bool(record.error) and not record.trainable and not exported


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with closing(Store.open(tmp_path / "store")) as remaining:
        yield remaining


@needs_bwrap
@pytest.mark.parametrize("agent", [AT_ONCE, STUBBORN, LEAVING], ids=["gives up", "asks again", "hangs up"])
@pytest.mark.parametrize("fault", BROKEN.values(), ids=BROKEN)
def test_a_broken_endpoint_is_not_charged_to_a_command_agent(store: Store, fault: Any, agent: str) -> None:
    record = ended(store, fault, agent)
    assert (record.outcome, unscored(store, record)) == (Outcome.MODEL, True)
    assert record.outcome.is_infrastructure


@pytest.mark.parametrize("fault", BROKEN.values(), ids=BROKEN)
def test_a_broken_endpoint_is_not_charged_to_the_loop(tmp_path: Path, fault: dict[str, Any]) -> None:
    script = turns(SAYS, {"text": "Done."}, faults=[fault])
    record, _, store = run(played(tmp_path, FakeSession(), script, agent_timeout=2.0))
    with closing(store):
        assert (record.outcome, unscored(store, record)) == (Outcome.MODEL, True)


@needs_bwrap
def test_an_endpoint_that_breaks_in_the_middle_takes_the_whole_score(store: Store) -> None:
    """What was answered before is not trained on either: nobody knows what it was worth."""
    record = ended(store, {"turn": 1, "hang": 600}, AT_ONCE)
    assert (record.outcome, record.trainable_calls, unscored(store, record)) == (Outcome.MODEL, 1, True)


@needs_bwrap
def test_attempts_that_stall_one_after_the_other_are_one_silence(store: Store) -> None:
    """The call in flight has received nothing, although its last attempt has only begun."""
    slow = {
        "turns": [{"tool": "bash", "arguments": {"command": "echo 42 > answer.txt; sleep 1.6"}}, {"text": "Done."}]
    }
    fault = {"turn": 1, "hang": 600, **ALWAYS}
    record = ended(store, fault, AT_ONCE, seconds=3.0, script=slow, stall_timeout=0.6)
    assert (record.outcome, unscored(store, record)) == (Outcome.MODEL, True)


@needs_bwrap
def test_a_slow_but_steady_answer_is_an_ordinary_timeout(store: Store) -> None:
    record = ended(store, {"per_token_delay": 0.05}, AT_ONCE, script={"turns": [LONG]})
    assert (record.outcome, record.reward) == (Outcome.TIMEOUT, 0.0)


def test_the_loop_times_out_on_a_slow_but_steady_answer(tmp_path: Path) -> None:
    script = turns(LONG, faults=[{"per_token_delay": 0.05}])
    record, _, store = run(played(tmp_path, FakeSession(), script, agent_timeout=1.5))
    store.close()
    assert (record.outcome, record.reward) == (Outcome.TIMEOUT, 0.0)


@needs_bwrap
def test_an_agent_that_is_slow_itself_times_out(store: Store) -> None:
    record = ended(store, {}, "converse(); import time; time.sleep(60)")
    assert (record.outcome, record.reward) == (Outcome.TIMEOUT, 1.0)


@needs_bwrap
def test_a_stall_limit_can_be_given(store: Store) -> None:
    """The stream is cut off and tried again, and the second try is answered."""
    record = ended(store, {"stall_after": 0}, AT_ONCE, seconds=10.0, stall_timeout=0.3)
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0)
    (first, _) = store.calls(record.rollout_id)
    assert [attempt["status"] for attempt in first.attempts] == [None]


@needs_bwrap
def test_a_context_overflow_is_reported_and_the_work_counts(store: Store) -> None:
    command = "echo 42 > answer.txt; head -c 9000 /dev/zero | tr '\\0' x"
    overflows = {
        "turns": [{"tool": "bash", "arguments": {"command": command}}, {"text": "Done."}],
        "max_context": 2000,
    }
    record = ended(store, {}, AT_ONCE, script=overflows)
    assert (record.outcome, record.reward) == (Outcome.BUDGET, 1.0)
    assert "longer than the model's context" in (record.error or "")


@needs_bwrap
def test_a_context_too_small_for_the_first_prompt_is_not_charged(store: Store) -> None:
    record = ended(store, {}, AT_ONCE, script={"max_context": 5})
    assert (record.outcome, unscored(store, record)) == (Outcome.MODEL, True)


@needs_bwrap
def test_a_lasting_400_is_reported_and_the_work_counts(store: Store) -> None:
    record = ended(store, {"turn": 1, "status": 400, "message": "a bad request", **ALWAYS}, AT_ONCE)
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0)
    assert "a bad request" in (record.error or "")
