"""The loop in Paddock's own environments."""

from pathlib import Path
from typing import Any

import pytest

from paddock import ToolEnvironment, tool
from paddock.envs.counter import Counter
from paddock.envs.notes import Notes
from paddock.errors import ConfigError
from paddock.models.replay import ReplayServer
from paddock.rollouts.api import run_batch, run_rollout
from paddock.rollouts.loop.agent import LoopAgent
from paddock.rollouts.loop.environment import EnvironmentSession, action_parameters, tool_result
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.tasks.task import Task
from paddock.tools import ToolReturn
from rollouts.loop.fake_session import played, turns
from rollouts.played import needs_bwrap, run


class Safe(ToolEnvironment):
    @tool
    def turn(self, number: int) -> ToolReturn:
        return ToolReturn("open", reward=1.0, done=True) if number == 42 else ToolReturn("click", reward=-0.25)


def rolled(folder: Path, scene: EnvironmentSession, *script: dict[str, Any]) -> RolloutRecord:
    record, _, store = run(played(folder, scene, turns(*script)))
    store.close()
    return record


def test_tools_are_called_in_one_session(tmp_path: Path) -> None:
    adds = {"tool": "add_note", "arguments": {"title": "milk"}}
    record = rolled(
        tmp_path, EnvironmentSession(Notes, "Note milk."), adds, {"tool": "list_notes"}, {"text": "Done."}
    )
    assert (record.outcome, record.reward) == (Outcome.OK, None)
    assert "milk" in record.transcript[5]["content"]


def test_rewards_add_up_and_the_environment_ends_the_episode(tmp_path: Path) -> None:
    script = [{"tool": "turn", "arguments": {"number": number}} for number in (7, 42, 8)]
    record = rolled(tmp_path, EnvironmentSession(Safe, "Open the safe."), *script)
    assert (record.outcome, record.reward, record.call_count) == (Outcome.OK, 0.75, 2)


def test_the_model_gets_an_error_for_wrong_arguments(tmp_path: Path) -> None:
    record = rolled(tmp_path, EnvironmentSession(Notes, "Note."), {"tool": "add_note"}, {"text": "Done."})
    assert record.outcome is Outcome.OK
    assert "title" in record.transcript[3]["content"]


def test_an_environment_without_tools_is_stepped(tmp_path: Path) -> None:
    steps = [{"tool": "act", "arguments": {"amount": amount}} for amount in (2, 3)]
    record = rolled(tmp_path, EnvironmentSession(Counter, "Count."), *steps, {"text": "Done."})
    assert record.outcome is Outcome.OK
    assert '"total":5' in record.transcript[5]["content"]


def test_what_the_environment_shows_first_is_part_of_the_prompt(tmp_path: Path) -> None:
    record = rolled(tmp_path, EnvironmentSession(Counter, "Count.", seed=3), {"text": "No."})
    assert record.transcript[1]["content"] == 'Count.\n\nThe environment shows:\n{"total":0}'
    assert record.metadata["reset"] == {"seed": 3}


def test_the_model_gets_the_field_of_a_wrong_action(tmp_path: Path) -> None:
    script = ({"tool": "act", "arguments": {"amount": -1}}, {"text": "Done."})
    record = rolled(tmp_path, EnvironmentSession(Counter, "Count."), *script)
    assert (record.outcome, record.reward) == (Outcome.OK, None)
    assert record.transcript[3]["content"].startswith("Error: amount: Input should be greater than or equal to 0")


def test_the_model_gets_the_content_of_a_tool_result(tmp_path: Path) -> None:
    record = rolled(
        tmp_path, EnvironmentSession(Safe, "Open."), {"tool": "turn", "arguments": {"number": 1}}, {"text": "."}
    )
    assert record.transcript[3]["content"] == "click"
    image = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
    seen = tool_result({"content": [{"type": "text", "text": "look"}, image], "isError": False}, done=True)
    assert (seen.text, seen.done) == ("look", True)
    assert seen.images == [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]


def test_a_model_is_not_offered_what_is_not_for_it() -> None:
    schema = {"type": "object", "properties": {"metadata": {}, "amount": {"type": "integer"}}, "required": ["amount"]}
    assert action_parameters(schema)["properties"] == {"amount": {"type": "integer"}}


ACTS = [{"tool": "act", "arguments": {"amount": amount}} for amount in (4, 6)]
COUNTS = "mkdir -p /logs/verifier; grep -c '\"Reach ten' transcript.json > /logs/verifier/reward.txt"


async def ran(folder: Path, task: Task, **options: Any) -> RolloutRecord:
    async with ReplayServer(turns(*ACTS)) as server:
        return await run_rollout(task, model=server.url, agent="loop", store=folder, **options)


def test_a_batch_is_run_in_an_environment(tmp_path: Path) -> None:
    task = Task("Reach ten.", metadata={"seed": 5, "reset": {"episode_id": "mine"}})
    record = run(ran(tmp_path, task, env=Counter, seed=1))
    assert (record.outcome, record.reward, record.agent, record.sandbox) == (Outcome.OK, 10.0, "loop", "environment")
    assert record.metadata["reset"] == {"episode_id": "mine", "seed": 5}
    assert record.trainable_calls == record.call_count == 2


@needs_bwrap
def test_a_tasks_own_verifier_comes_first(tmp_path: Path) -> None:
    record = run(ran(tmp_path, Task("Reach ten.", verifier=COUNTS), env=Counter))
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"agent": "loop"}, "needs an environment"), ({"agent": "opencode", "env": Counter}, "works in a sandbox")],
)
def test_an_agent_and_its_place_must_fit(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    async def start() -> Any:
        async with ReplayServer(turns(*ACTS)) as server:
            return await run_batch([Task("Go.")], model=server.url, store=tmp_path, **options)

    with pytest.raises(ConfigError, match=words):
        run(start())


def test_the_loop_is_an_agent_by_name() -> None:
    from paddock.agents import load_agent

    agent = load_agent("loop")
    assert isinstance(agent, LoopAgent)
    assert agent.version


def test_the_credentials_of_a_url_are_not_in_its_evidence() -> None:
    session = EnvironmentSession("https://me:hunter22@host/env", "Go.")
    assert session.evidence["environment"] == "https://host/env"
