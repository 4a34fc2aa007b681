"""A batch goes on only as what it was, and runs again what was not the policy's."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paddock.agents.command import CommandAgent
from paddock.envs.counter import Counter
from paddock.envs.notes import Notes
from paddock.errors import AgentError, ConfigError
from paddock.limits import Budget, RolloutTimeouts
from paddock.models.endpoint import Endpoint
from paddock.rollouts.api import run_batch
from paddock.rollouts.batch import BatchResult
from paddock.rollouts.config import RunConfig
from paddock.rollouts.loop.agent import LoopAgent
from paddock.rollouts.resume import differences, has_larger_limits, is_settled
from paddock.sandbox.base import Mount
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.tasks.task import Task
from rollouts.played import NOBODY_THERE, a_task, needs_bwrap, run, shell

pytestmark = needs_bwrap
SOLVE = "echo 42 > answer.txt"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as reopened:
        yield reopened


def batch(store: Store, **options: Any) -> BatchResult:
    chosen: dict[str, Any] = {"tasks": [a_task()], "model": NOBODY_THERE, "agent": shell(SOLVE), **options}
    return run(run_batch(chosen.pop("tasks"), store=store, **chosen))


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"agent": shell("true")}, "command was"),
        ({"model": Endpoint("http://127.0.0.1:1/v1", "somebody", engine="vllm")}, 'model_name was "nobody"'),
        ({"temperature": 0.5}, "temperature was 1.0 and is 0.5"),
        ({"thinking": True}, "thinking was null and is true"),
        ({"mode": "black_box"}, "mode was"),
        ({"tasks": [a_task(instruction="Now something else.")]}, "task answer has changed"),
    ],
)
@pytest.mark.parametrize("by", ["resume", "batch_id"])
def test_another_policy_or_task_is_refused_by_name(
    store: Store, by: str, changed: dict[str, Any], names: str
) -> None:
    batch(store, batch_id="b-one")
    with pytest.raises(ConfigError, match="b-one cannot go on") as caught:
        batch(store, **{by: "b-one"}, **changed)
    assert names in caught.value.message
    assert store.count() == 1


def test_a_batch_of_other_tasks_is_refused(store: Store) -> None:
    batch(store, batch_id="b-one")
    with pytest.raises(ConfigError, match="no rollout of another") as caught:
        batch(store, resume="b-one", tasks=[a_task(id="another")])
    assert "answer" in (caught.value.hint or "")
    assert len(batch(store, batch_id="b-one", tasks=[a_task(id="another")]).records) == 1


def in_environment(store: Store, **options: Any) -> BatchResult:
    chosen: dict[str, Any] = {"env": Counter, "seed": 3, "agent": LoopAgent(), "retries": 0, **options}
    return batch(store, tasks=[Task("Count.", id="count")], **chosen)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"seed": 4}, "seed was 3 and is 4"),
        ({"env": Notes}, 'env was "paddock.envs.counter:Counter" and is "paddock.envs.notes:Notes"'),
        ({"env": "http://me:secret@127.0.0.1:9/counter?key=secret"}, 'and is "http://127.0.0.1:9/counter"'),
        ({"env_name": "another"}, 'and is "another"'),
    ],
)
def test_another_environment_or_seed_is_refused_by_name(store: Store, changed: dict[str, Any], names: str) -> None:
    in_environment(store, batch_id="b-one")
    with pytest.raises(ConfigError, match="b-one cannot go on") as caught:
        in_environment(store, resume="b-one", **changed)
    assert names in caught.value.message
    assert "secret" not in caught.value.message
    assert len(in_environment(store, resume="b-one").records) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"model": Endpoint("http://127.0.0.1:2/v1", "nobody", api_key="sk-other", engine="vllm")},
        {"budget": Budget(calls=7)},
        {"agent_timeout": 3.0, "stall_timeout": 1.0},
        {"timeouts": RolloutTimeouts(agent=3)},
        {"n": 2, "retries": 1, "parallel": 2},
        {"tasks": [a_task(), a_task(id="another")]},
    ],
)
def test_endpoint_budgets_and_deadlines_may_change(store: Store, changed: dict[str, Any]) -> None:
    (first,) = batch(store, batch_id="b-one").records
    assert batch(store, resume="b-one", **changed).records[0].rollout_id == first.rollout_id


def test_an_unknown_batch_is_refused_with_the_known_ones(store: Store) -> None:
    batch(store, batch_id="b-one")
    with pytest.raises(ConfigError, match="no batch 'b-noe'") as caught:
        batch(store, resume="b-noe")
    assert "b-one" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="both"):
        batch(store, resume="b-one", batch_id="b-two")
    assert store.count() == 1


class Fetched(CommandAgent):
    """An agent whose first installations fail."""

    failures = 1
    installs = 0

    async def fetch(self, log: Callable[[str], None], *, timeout: float) -> tuple[Mount, ...]:
        Fetched.installs += 1
        if Fetched.failures:
            Fetched.failures -= 1
            raise AgentError("the registry does not answer")
        return await super().fetch(log, timeout=timeout)


def test_a_failed_install_is_run_again(store: Store) -> None:
    agent = Fetched(f"/bin/bash -c '{SOLVE}'")
    Fetched.failures = 1
    (first,) = batch(store, batch_id="b-one", agent=agent).records
    (second,) = batch(store, resume="b-one", agent=agent).records
    assert (first.outcome, second.outcome, second.reward) == (Outcome.AGENT, Outcome.OK, 1.0)


@pytest.mark.parametrize(
    ("failures", "outcome", "installs"),
    [(1, Outcome.OK, 4), (10**6, Outcome.AGENT, 3)],
    ids=["comes back", "stays away"],
)
def test_a_failed_install_is_tried_again_by_one_member_for_all(
    store: Store, failures: int, outcome: Outcome, installs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paddock.rollouts.batch.PAUSE_SECONDS", 0.01)
    Fetched.failures, Fetched.installs = failures, 0
    records = batch(store, n=3, retries=2, agent=Fetched(f"/bin/bash -c '{SOLVE}'")).records
    assert [record.outcome for record in records] == [outcome] * 3
    assert Fetched.installs == installs
    assert all("registry" in (record.error or "") for record in records) is (outcome is Outcome.AGENT)


@pytest.mark.parametrize(
    ("outcome", "stages", "settled"),
    [
        (Outcome.OK, ("install", "agent", "verifier"), True),
        (Outcome.TIMEOUT, ("agent",), True),
        (Outcome.BUDGET, ("agent",), True),
        (Outcome.VERIFIER, ("agent", "verifier"), True),
        (Outcome.TASK, ("install",), True),
        (Outcome.AGENT, ("install", "agent"), True),
        (Outcome.AGENT, ("install",), False),
        (Outcome.MODEL, ("agent",), False),
        (Outcome.SANDBOX, ("sandbox",), False),
        (Outcome.ENVIRONMENT, ("agent",), False),
        (Outcome.CANCELLED, ("agent",), False),
        (None, (), False),
    ],
)
def test_what_is_not_the_policys_is_run_again(
    outcome: Outcome | None, stages: tuple[str, ...], settled: bool
) -> None:
    record = RolloutRecord("r", "t", outcome=outcome, stages=dict.fromkeys(stages, 1.0))
    assert is_settled(record) is settled


def test_another_agent_is_named_without_its_settings() -> None:
    before = {"agent": "opencode", "driver": "run", "version": "1", "temperature": 1.0}
    assert differences(before, {"agent": "codex", "driver": "serve", "version": "2", "temperature": 1.0}) == [
        'agent was "opencode" and is "codex"'
    ]


def ended_with(outcome: Outcome, **config: Any) -> RolloutRecord:
    return RolloutRecord("r1", "answer", outcome=outcome, config=config)


@pytest.mark.parametrize(
    ("record", "now", "expected"),
    [
        (ended_with(Outcome.TIMEOUT, agent_timeout=None), {"agent_timeout": 11.0}, True),
        (ended_with(Outcome.TIMEOUT, agent_timeout=None), {}, False),
        (ended_with(Outcome.TIMEOUT, agent_timeout=5.0), {}, True),
        (ended_with(Outcome.TIMEOUT, agent_timeout=None), {"timeouts": RolloutTimeouts(agent=30)}, True),
        (ended_with(Outcome.BUDGET, steps=50), {"max_steps": 51}, True),
        (ended_with(Outcome.BUDGET, steps=50, budget={"calls": 200}), {}, False),
        (ended_with(Outcome.BUDGET, budget={"calls": 200}), {"budget": Budget(calls=None)}, True),
        (ended_with(Outcome.OK, budget={"calls": 200}), {"budget": Budget(calls=300)}, False),
    ],
)
def test_a_member_continues_if_its_limit_is_larger_now(
    record: RolloutRecord, now: dict[str, Any], expected: bool
) -> None:
    """The task allows ten seconds."""
    assert has_larger_limits(record, RunConfig(model="demo", **now), a_task()) is expected
