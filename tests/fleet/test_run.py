"""Rollouts of fleet tasks on a real plane, with a model that plays a script."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paddock.errors import ConfigError, TaskError
from paddock.fleet.client.models import Instance
from paddock.fleet.client.plane_client import InstanceOptions, PlaneClient
from paddock.fleet.client.provisioning import Provisioning
from paddock.fleet.instance.browser import PROGRAMS
from paddock.fleet.run import as_task, fork_task, needed_seconds, read_task, read_tasks, run_tasks
from paddock.limits import RolloutTimeouts
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.rollouts.batch import BatchResult
from paddock.store import Store
from paddock.store.outcome import Outcome
from rollouts.played import run

from .plane_process import PlaneProcess, adds, note_task, plane_process, played

DONE = {"text": "Done."}
slow = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlaneProcess]:
    with plane_process(tmp_path_factory.mktemp("plane"), "--faults", "--warm", "4") as started:
        yield started


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store.open(tmp_path / "store")) as opened:
        yield opened


async def ran(
    plane: PlaneProcess, store: Store, tasks: list[dict[str, Any]], script: dict[str, Any], **options: Any
) -> BatchResult:
    async with ReplayServer(script) as server:
        endpoint = Endpoint(server.url, "replay", engine="vllm")
        chosen = {"retries": 0, **options}
        return await run_tasks(tasks, plane=plane.address, model=endpoint, store=store, **chosen)


def test_tasks_get_their_rewards_and_no_instance_is_left(plane: PlaneProcess, store: Store) -> None:
    titles = ["milk", "bread", "eggs", "salt"]
    script = played(*titles[:3])
    script["tasks"].append({"when": "called salt.", "turns": [adds("pepper"), DONE]})
    result = run(ran(plane, store, [note_task(title) for title in titles], script, parallel=4))
    assert [record.reward for record in result.records] == [1.0, 1.0, 1.0, 0.0]
    assert {record.outcome for record in result.records} == {Outcome.OK}
    made = plane.instances(run_id=result.batch_id)
    assert sorted(each["instance_id"] for each in made) == sorted(
        record.metadata["instance_id"] for record in result.records
    )
    assert plane.alive() == []


def test_a_record_has_the_fields_of_a_coding_agents_record(plane: PlaneProcess, store: Store) -> None:
    task = note_task("tea", data_key="shop", data_version="v2")
    result = run(ran(plane, store, [task], played("tea")))
    stored = store.get(result.records[0].rollout_id)
    assert stored is not None
    assert (stored.agent, stored.sandbox, stored.task_id, stored.level) == ("loop", "fleet", "note-tea", "tokens")
    assert list(stored.stages) == ["provision", "tools", "agent", "verifier"]
    expected = {name: stored.metadata[name] for name in ("env_key", "env_version", "modality", "data_key")}
    assert expected == {"env_key": "notes", "env_version": "v0.0.2", "modality": "tool_use", "data_key": "shop"}
    assert stored.trainable
    assert "rows: 2" in stored.verifier_stdout
    calls = store.calls(stored.rollout_id)
    assert len(calls) == 3
    assert all(call.trainable for call in calls)
    assert plane.address.api_key not in json.dumps(
        [stored.config, stored.metadata, stored.transcript, stored.proxy_log]
    )


def test_a_fork_repeats_the_calls_on_a_new_instance(plane: PlaneProcess, store: Store) -> None:
    async def play() -> None:
        async with ReplayServer(played("jam")) as server:
            model = {"model": Endpoint(server.url, "replay", engine="vllm"), "store": store, "retries": 0}
            (source,) = (await run_tasks([note_task("jam")], plane=plane.address, **model)).records
            server.log.clear()
            result = await fork_task(source, at="c1", n=2, parallel=2, plane=plane.address, **model)
            assert [(each.reward, each.fork["fidelity"]["replayed_calls"]) for each in result.records] == [
                (1.0, 1)
            ] * 2
            assert len(server.log) == 2 * (source.call_count - 1)
            instances = {record.metadata["instance_id"] for record in (source, *result.records)}
            assert len(instances) == 3
            assert {record.metadata["env_version"] for record in result.records} == {source.metadata["env_version"]}
            assert {record.task_hash for record in result.records} == {source.task_hash}
            with pytest.raises(ConfigError, match="has no call c9"):
                await fork_task(source, at="c9", plane=plane.address, **model)
        assert plane.alive() == []

    run(play())


def test_a_submitted_answer_reaches_the_verifier_and_ends_the_episode(plane: PlaneProcess, store: Store) -> None:
    code = "def verify(env, final_answer, conversation):\n    print(conversation)\n    return float(final_answer)"
    task = note_task("x", prompt="How many? Use submit_final_answer.", verifier_code=code)
    submits = {"tool": "submit_final_answer", "arguments": {"answer": "0.5"}}
    record = run(ran(plane, store, [task], {"turns": [submits, DONE]})).records[0]
    assert (record.outcome, record.reward, record.call_count) == (Outcome.OK, 0.5, 1)
    assert "How many?" in record.verifier_stdout


def test_a_verifier_that_breaks_leaves_the_grade_unknown(plane: PlaneProcess, store: Store) -> None:
    task = note_task("x", verifier_code="def verify(env):\n    raise ValueError('no idea')")
    record = run(ran(plane, store, [task], {"turns": [DONE]})).records[0]
    assert (record.outcome, record.reward) == (Outcome.VERIFIER, None)
    assert "no idea" in (record.reward_reason or "")


def test_a_task_without_a_verifier_is_done_without_a_reward(plane: PlaneProcess, store: Store) -> None:
    task = note_task("x", verifier_code=None)
    record = run(ran(plane, store, [task], {"turns": [adds("x"), DONE]})).records[0]
    assert (record.outcome, record.reward, record.reward_reason) == (Outcome.OK, None, "no_verifier")


def test_a_tool_error_reaches_the_model(plane: PlaneProcess, store: Store) -> None:
    wrong = {"tool": "add_note", "arguments": {"titel": "x"}}
    record = run(ran(plane, store, [note_task("x")], {"turns": [wrong, adds("x"), DONE]})).records[0]
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0)
    assert "titel" in record.transcript[3]["content"]


@slow
@pytest.mark.parametrize("then", [{"tool": "list_notes"}, DONE], ids=["before a call", "before the verifier"])
def test_an_expired_instance_is_the_outcome(plane: PlaneProcess, store: Store, then: dict[str, Any]) -> None:
    script = {"turns": [adds("x"), then, DONE], "faults": [{"turn": 1, "delay": 2.5}]}
    record = run(ran(plane, store, [note_task("x")], script, ttl_seconds=2)).records[0]
    assert (record.outcome, record.reward) == (Outcome.ENVIRONMENT, None)
    assert "instance" in (record.error or "").lower()


def test_an_unknown_environment_is_named(plane: PlaneProcess, store: Store) -> None:
    record = run(ran(plane, store, [note_task("x", env_key="nodes")], {"turns": [DONE]})).records[0]
    assert (record.outcome, list(record.stages)) == (Outcome.ENVIRONMENT, ["provision"])
    assert "'nodes' not found" in (record.error or "")


@slow
def test_steps_are_limited_and_the_work_is_graded(plane: PlaneProcess, store: Store) -> None:
    script = {"turns": [adds("x"), *[{"tool": "list_notes"}] * 9, DONE]}
    record = run(ran(plane, store, [note_task("x")], script, max_steps=3)).records[0]
    assert (record.outcome, record.reward, record.call_count) == (Outcome.BUDGET, 1.0, 4)


@slow
def test_time_is_limited_and_the_work_is_graded(plane: PlaneProcess, store: Store) -> None:
    script = {"turns": [adds("x"), {"text": "word " * 200}], "faults": [{"turn": 1, "per_token_delay": 0.05}]}
    record = run(ran(plane, store, [note_task("x")], script, agent_timeout=1.5)).records[0]
    assert (record.outcome, record.reward) == (Outcome.TIMEOUT, 1.0)
    assert plane.alive() == []


@slow
@pytest.mark.skipif(not any(map(shutil.which, PROGRAMS)), reason="this machine has no browser")
def test_a_screen_is_shown_to_the_model(plane: PlaneProcess, store: Store) -> None:
    looks = {"tool": "computer", "arguments": {"action": "screenshot"}}
    task = note_task("x", task_modality="computer_use")
    record = run(ran(plane, store, [task], {"turns": [looks, DONE]})).records[0]
    assert (record.outcome, record.reward) == (Outcome.OK, 0.0)
    first, visible = record.transcript[1]["content"], record.transcript[4]
    assert [part["type"] for part in first] == ["text", "image_url"]
    assert (visible["role"], visible["content"][0]["type"]) == ("user", "image_url")


@slow
def test_a_create_that_fails_for_a_while_is_made_once(plane: PlaneProcess, store: Store) -> None:
    plane.ask("POST", "/_lab/faults", {"method": "POST", "path": "^/v1/env/instances$", "status": 503, "times": 1})
    result = run(ran(plane, store, [note_task("x")], played("x")))
    assert result.records[0].reward == 1.0
    assert len(plane.instances(run_id=result.batch_id)) == 1


@slow
def test_a_member_that_broke_is_tried_again_as_a_new_rollout(plane: PlaneProcess, store: Store) -> None:
    script = {**played("x"), "faults": [{"turn": 0, "status": 401}]}
    result = run(ran(plane, store, [note_task("x")], script, retries=1))
    assert (result.records[0].outcome, result.records[0].attempt) == (Outcome.OK, 1)
    assert len(plane.instances(run_id=result.batch_id)) == 2
    assert plane.alive() == []


def test_cancelling_ends_everything_at_once(plane: PlaneProcess, store: Store) -> None:
    script = {"turns": [adds("x"), {"text": "word " * 200}], "faults": [{"turn": 1, "per_token_delay": 0.05}]}

    async def cancelled() -> float:
        tasks = [note_task(f"x{number}") for number in range(3)]
        work = asyncio.create_task(ran(plane, store, tasks, script, batch_id="b-cancelled"))
        while sum(record.call_count for record in store.list(batch_id="b-cancelled")) < 3:
            assert not work.done()
            await asyncio.sleep(0.02)
        began = asyncio.get_running_loop().time()
        work.cancel()
        await asyncio.wait([work])
        assert work.cancelled()
        return asyncio.get_running_loop().time() - began

    assert run(cancelled()) < 3
    assert [record.outcome for record in store.list(batch_id="b-cancelled")] == [Outcome.CANCELLED] * 3
    assert plane.alive() == []


@pytest.mark.parametrize("late", [0.0, 0.3], ids=["at once", "on its way"])
def test_cancelling_while_instances_are_made_leaves_none(
    plane: PlaneProcess, store: Store, monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    create = PlaneClient.create_once

    async def create_later(*arguments: Any, **options: Any) -> Instance:
        await asyncio.sleep(late)
        return await create(*arguments, **options)

    monkeypatch.setattr(PlaneClient, "create_once", create_later)

    async def cancelled() -> None:
        tasks = [note_task(f"x{number}") for number in range(4)]
        work = asyncio.create_task(ran(plane, store, tasks, {"turns": [DONE]}, batch_id="b-early"))
        while not store.list(batch_id="b-early"):
            await asyncio.sleep(0.001)
        work.cancel()
        await asyncio.wait([work])

    run(cancelled())
    assert plane.alive(run_id="b-early") == []


@slow
def test_instances_of_others_are_left_alone(plane: PlaneProcess, store: Store) -> None:
    async def beside() -> bool | None:
        others = PlaneClient(plane.address)
        handle = await Provisioning(others, InstanceOptions("notes", run_id="others"), seconds=20).run()
        await ran(plane, store, [note_task("x")], played("x"))
        gone = await others.is_gone(handle.instance_id)
        await handle.close()
        return gone

    assert run(beside()) is False


@slow
def test_a_batch_that_was_stopped_goes_on_where_it_was(plane: PlaneProcess, store: Store) -> None:
    tasks = [note_task("milk"), note_task("bread")]
    first = run(ran(plane, store, tasks[:1], played("milk", "bread"), batch_id="b-again"))
    second = run(ran(plane, store, tasks, played("milk", "bread"), batch_id="b-again"))
    assert second.records[0].rollout_id == first.records[0].rollout_id
    assert store.count(batch_id="b-again") == 2


# -- tasks as they are written ----------------------------------------------------------------------


@pytest.mark.parametrize("form", ["list", "object", "lines"])
def test_tasks_are_read_in_every_form(tmp_path: Path, form: str) -> None:
    tasks = [note_task("a"), note_task("b")]
    text = {
        "list": json.dumps(tasks),
        "object": json.dumps({"tasks": tasks}),
        "lines": "\n".join(json.dumps(task) for task in tasks),
    }[form]
    (tmp_path / "tasks.json").write_text(text)
    assert [task["task_key"] for task in read_tasks(tmp_path / "tasks.json")] == ["note-a", "note-b"]


def test_the_names_of_exports_are_understood() -> None:
    task = read_task({"key": "k", "prompt": "p", "env_id": "notes", "version": "v2", "verifier": {"code": "x"}})
    assert (task["task_key"], task["env_key"], task["env_version"]) == ("k", "notes", "v2")
    assert task["verifier_code"] == "x"


@pytest.mark.parametrize("text", ["", "{", "[]", "[1]", '{"tasks": 3}', '[{"task_key": "k", "prompt": "p"}]'])
def test_files_without_usable_tasks_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tasks.json").write_text(text)
    with pytest.raises(TaskError, match=r"tasks\.json"):
        read_tasks(tmp_path / "tasks.json")


def test_a_changed_task_has_another_hash() -> None:
    first, second = (as_task(note_task("a", data_key=key)).hash for key in ("x", "y"))
    assert first != second


def test_an_instance_lives_longer_than_its_agent_may_take() -> None:
    assert needed_seconds(RolloutTimeouts(setup=10, agent=100, verifier=20), None) > 130
    assert needed_seconds(RolloutTimeouts(setup=10, agent=100, verifier=20), 1000.5) > 1030
