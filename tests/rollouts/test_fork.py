"""Forks and resumed members: recorded calls are replayed, and only the rest is sampled."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddock.agents.command import CommandAgent
from paddock.errors import ConfigError, StoreError, TaskError
from paddock.limits import Budget
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.rollouts.api import run_batch
from paddock.rollouts.config import RunConfig
from paddock.rollouts.fork import fork, read_edit, restore_config
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from rollouts.played import NOBODY_THERE, UPSTREAM_KEY, a_task, needs_bwrap, roll, run, speaker

pytestmark = needs_bwrap
COMMANDS = ("echo $RANDOM", "echo 41 > answer.txt", "echo 42 > answer.txt", "cat answer.txt")
SCRIPT: dict[str, Any] = {
    "turns": [*({"tool": "bash", "arguments": {"command": command}} for command in COMMANDS), {"text": "Done."}]
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        yield opened


def endpoint_of(server: ReplayServer) -> Endpoint:
    return Endpoint(server.url, "replay", api_key=UPSTREAM_KEY, engine="vllm")


async def record_one(store: Store, server: ReplayServer, **options: Any) -> RolloutRecord:
    record = await roll(store, speaker(), model=endpoint_of(server), **options)
    server.log.clear()
    return record


async def forked(store: Store, server: ReplayServer, source: RolloutRecord, **options: Any) -> list[RolloutRecord]:
    chosen = {"model": endpoint_of(server), "agent": speaker(), "store": store, **options}
    return (await fork(source, **chosen)).records


def test_a_fork_samples_only_from_the_chosen_call_on(store: Store) -> None:
    async def play() -> None:
        async with ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server:
            source = await record_one(store, server)
            records = await forked(store, server, source, at="c2", n=2, parallel=2)
            assert [(record.outcome, record.reward) for record in records] == [(Outcome.OK, 1.0)] * 2
            assert len(server.log) == 2 * (source.call_count - 2)
            for record in records:
                assert record.fork["source"] == source.rollout_id
                assert record.fork["fidelity"]["replayed_calls"] == 2
                calls = store.calls(record.rollout_id)
                recorded = store.calls(source.rollout_id)
                for call, original in zip(calls[:2], recorded[:2], strict=True):
                    assert call.replayed_from == f"{source.rollout_id}/{original.id}"
                    assert call.completion_token_ids == original.completion_token_ids
                    assert call.logprobs == original.logprobs
                    assert not call.trainable
                assert all(call.trainable and call.replayed_from is None for call in calls[2:])

    run(play())


def test_random_tool_output_is_reported(store: Store) -> None:
    async def play() -> None:
        async with ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server:
            source = await record_one(store, server)
            (record,) = await forked(store, server, source, at=3)
            assert record.fork["fidelity"]["state"] in ("tool_output", "equal")
            (strict,) = await forked(store, server, source, at=0, policy="strict")
            assert (strict.outcome, strict.fork["fidelity"]["replayed_calls"]) == (Outcome.OK, 0)

    run(play())


def test_an_agent_that_does_something_else_ends_unscored(store: Store) -> None:
    async def play() -> None:
        async with ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server:
            source = await record_one(store, server)
            other = speaker()
            task = a_task(instruction="Do something else.")
            (record,) = await forked(store, server, source, at=2, task=task, agent=other, policy="strict")
            assert (record.outcome, record.reward) == (Outcome.TASK, None)
            assert "diverged" in (record.error or "")
            assert record.fork["fidelity"]["diverged_at"] == "c0"
            assert server.log == []

    run(play())


class Versioned(CommandAgent):
    def __init__(self, version: str) -> None:
        super().__init__(shlex.join(speaker().words))
        self._version = version

    @property
    def version(self) -> str:  # type: ignore[override]
        return self._version

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "version": self.version}


def test_another_version_of_the_agent_is_a_warning(store: Store) -> None:
    async def play() -> None:
        async with ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server:
            source = await roll(store, Versioned("9.8"), model=endpoint_of(server))
            (record,) = await forked(store, server, source, at=2, agent=Versioned("9.9"))
            warnings = [event.data for _, event in store.events(record.rollout_id) if event.kind == "warning"]
            assert warnings == [{"warning": "the recorded rollout is of command 9.8, and this one is 9.9"}]

    run(play())


def test_an_edited_answer_changes_what_follows(store: Store) -> None:
    async def play() -> None:
        async with ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server:
            source = await record_one(store, server)
            edit = {"answer": {"content": "I stop here."}}
            (record,) = await forked(store, server, source, at=2, edit=edit)
            assert (record.outcome, record.reward, record.call_count) == (Outcome.OK, 0.0, 3)
            assert server.log == []

    run(play())


def test_a_fork_can_be_forked(store: Store) -> None:
    async def play() -> None:
        async with ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server:
            source = await record_one(store, server)
            (child,) = await forked(store, server, source, at=1)
            (grandchild,) = await forked(store, server, child, at=3)
            calls = store.calls(grandchild.rollout_id)
            assert [call.replayed_from for call in calls[:2]] == [
                f"{source.rollout_id}/c0",
                f"{child.rollout_id}/c1",
            ]

    run(play())


def test_a_fork_that_needs_no_live_call_needs_no_model(store: Store) -> None:
    async def play() -> None:
        async with ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server:
            source = await record_one(store, server)
        result = await fork(source, at=source.call_count, model=NOBODY_THERE, agent=speaker(), store=store)
        (record,) = result.records
        assert (record.outcome, record.reward, record.call_count) == (Outcome.OK, 1.0, source.call_count)

    run(play())


def test_the_name_of_the_model_is_restored() -> None:
    config = RunConfig(model="http://127.0.0.1:1/v1").to_json()
    record = RolloutRecord("r1", "t", config={"model_name": "policy"}, run_config=config)
    assert restore_config(record, {}).model_name == "policy"
    assert restore_config(record, {"model": "http://127.0.0.1:2/v1"}).model_name is None


def test_a_fork_of_an_unscored_fork_trains_on_no_call_twice(store: Store) -> None:
    fails = {**SCRIPT, "faults": [{"turn": 4, "status": 401, "times": 9}]}

    async def play() -> None:
        async with (
            ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server,
            ReplayServer(fails, api_key=UPSTREAM_KEY) as failing,
        ):
            source = await record_one(store, server)
            (child,) = await forked(store, failing, source, at=2, retries=0)
            assert (child.outcome, child.reward) == (Outcome.MODEL, None)
            (grandchild,) = await forked(store, server, child, at=4)
            copies = [call.is_copy for call in store.calls(grandchild.rollout_id)]
            assert copies == [True, True, False, False, False]

    run(play())


def test_a_batch_of_forks_is_resumed_at_its_fork_or_later(store: Store) -> None:
    """A member that ended before its fork begins again: otherwise calls would be sampled that are recorded."""

    async def play() -> None:
        async with ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server:
            source = await record_one(store, server)
            await forked(store, server, source, at=3, n=1, batch_id="b-one", budget=Budget(calls=2))
            await forked(store, server, source, at=3, n=2, resume="b-one", budget=Budget(calls=4))
            server.log.clear()
            with pytest.raises(ConfigError, match=r"it was a fork of .* at c3 .* and is a fork of .* at c2"):
                await forked(store, server, source, at=2, resume="b-one")
            again = await forked(store, server, source, at=3, n=2, resume="b-one", budget=Budget(calls=9))
            assert [(record.reward, record.fork["kind"]) for record in again] == [(1.0, "resume")] * 2
            assert len(server.log) == 2

    run(play())


def test_a_batch_of_edited_forks_is_resumed_with_the_same_edit(store: Store) -> None:
    async def play() -> None:
        async with ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server:
            source = await record_one(store, server)
            edit = {"answer": {"tool_calls": [{"name": "bash", "arguments": {"command": "true"}}]}}
            (first,) = await forked(store, server, source, at=2, batch_id="b-one", edit=edit)
            (again,) = await forked(store, server, source, at=2, resume="b-one", edit=edit)
            assert again.rollout_id == first.rollout_id
            with pytest.raises(ConfigError, match=r"with the edit .* and is a fork of .* at c2 .tolerant.\n"):
                await forked(store, server, source, at=2, resume="b-one")

    run(play())


def test_a_batch_with_a_larger_budget_continues_its_members(store: Store) -> None:
    async def play() -> None:
        async with ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server:
            options = {"model": endpoint_of(server), "agent": speaker(), "store": store}
            first = await run_batch([a_task()], budget=Budget(calls=2), batch_id="b-one", **options)
            assert first.records[0].outcome is Outcome.BUDGET
            server.log.clear()
            again = await run_batch([a_task()], budget=Budget(calls=20), resume="b-one", **options)
            (record,) = again.records
            assert (record.outcome, record.reward) == (Outcome.OK, 1.0)
            assert record.fork["kind"] == "resume"
            assert len(server.log) == len(COMMANDS) + 1 - 2

    run(play())


def test_after_an_outage_a_batch_goes_on_at_another_url(store: Store) -> None:
    fails = {**SCRIPT, "faults": [{"turn": 3, "status": 401, "times": 9}]}

    async def play() -> None:
        options: dict[str, Any] = {"agent": speaker(), "store": store, "retries": 0}
        async with ReplayServer(fails, api_key=UPSTREAM_KEY) as server:
            first = await run_batch([a_task()], model=endpoint_of(server), batch_id="b-one", **options)
            assert first.records[0].outcome is Outcome.MODEL
        async with ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server:
            again = await run_batch([a_task()], model=endpoint_of(server), resume="b-one", **options)
            assert again.records[0].reward == 1.0
            assert [served.turn for served in server.log] == [3, 4]

    run(play())


def test_from_start_samples_everything_again(store: Store) -> None:
    async def play() -> None:
        async with ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server:
            options = {"model": endpoint_of(server), "agent": speaker(), "store": store}
            await run_batch([a_task()], budget=Budget(calls=2), batch_id="b-one", **options)
            server.log.clear()
            (record,) = (await run_batch([a_task()], resume="b-one", from_start=True, **options)).records
            assert (record.reward, record.fork, len(server.log)) == (1.0, {}, len(COMMANDS) + 1)

    run(play())


def test_what_cannot_be_forked_is_refused(store: Store) -> None:
    async def play() -> None:
        async with ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server:
            source = await record_one(store, server)
            with pytest.raises(StoreError, match="there is no rollout"):
                await fork("nobody", at=1, store=store)
            with pytest.raises(ConfigError, match="has no call c9"):
                await fork(source, at="c9", store=store)
            with pytest.raises(ConfigError, match="policy is 'loose'"):
                await fork(source, at=1, policy="loose", store=store)  # type: ignore[arg-type]

    run(play())


def test_a_rollout_without_its_task_asks_for_it(store: Store) -> None:
    async def play() -> None:
        async with ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server:
            source = await record_one(store, server, task=a_task(files={"big.bin": bytes(33 * 1024 * 1024)}))
            with pytest.raises(TaskError, match="recorded without its task"):
                await fork(source, at=1, store=store)

    run(play())


def test_a_config_is_restored_from_its_record() -> None:
    config = RunConfig(
        model="http://127.0.0.1:1/v1",
        agent="pi",
        temperature=0.5,
        budget=Budget(calls=7),
        network="allowlist:example.com",
        api_key="secret-key",
        n=4,
    )
    values = config.to_json()
    assert "secret-key" not in str(values)
    restored = RunConfig.from_json(values, temperature=0.7)
    assert (restored.agent, restored.temperature, restored.budget, restored.n) == ("pi", 0.7, Budget(calls=7), 1)
    assert str(restored.agent_network) == str(config.agent_network)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"answers": "x"}, "no key 'answers'"),
        ({"answer": 5}, "answer is neither"),
        ({"answer": {"text": "Hello."}}, "an answer has no key 'text'"),
        ({"answer": {"tool_calls": [{}]}}, r"tool_calls\[0\] has no name"),
        ({"answer": {"tool_calls": {"name": "bash"}}}, "tool_calls is not a list"),
        ({"answer": {"tool_calls": [{"name": "bash", "arguments": 5}]}}, r"arguments of tool_calls\[0\]"),
        ({"answer": {"content": 5}}, "content of the answer is not a text"),
        ({"tool_result": 5}, "tool_result is not a text"),
        ({"answer": "Hello.", "tool_call_id": "c"}, "which tool_result"),
    ],
)
def test_a_wrong_edit_names_its_field(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_edit(document)


def test_an_edit_may_write_tool_calls_in_short() -> None:
    edit = read_edit({"answer": {"tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}})
    assert edit.answer is not None
    assert edit.answer["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command":"ls"}'}
