"""The loop in Paddock's own environments."""

from pathlib import Path
from typing import Any

from paddock import ToolEnvironment, tool
from paddock.envs.counter import Counter
from paddock.envs.notes import Notes
from paddock.rollouts.loop.environment import EnvironmentScene
from paddock.rollouts.outcome import Outcome
from paddock.rollouts.record import RolloutRecord
from paddock.tools import ToolReturn
from rollouts.loop.scenes import played, turns
from rollouts.played import run


class Safe(ToolEnvironment):
    @tool
    def turn(self, number: int) -> ToolReturn:
        return ToolReturn("open", reward=1.0, done=True) if number == 42 else ToolReturn("click", reward=-0.25)


def rolled(folder: Path, scene: EnvironmentScene, *script: dict[str, Any]) -> RolloutRecord:
    record, _, store = run(played(folder, scene, turns(*script)))
    store.close()
    return record


def test_tools_are_called_in_one_session(tmp_path: Path) -> None:
    adds = {"tool": "add_note", "arguments": {"title": "milk"}}
    record = rolled(tmp_path, EnvironmentScene(Notes, "Note milk."), adds, {"tool": "list_notes"}, {"text": "Done."})
    assert (record.outcome, record.reward) == (Outcome.OK, None)
    assert "milk" in record.transcript[5]["content"]


def test_rewards_add_up_and_the_environment_ends_the_episode(tmp_path: Path) -> None:
    script = [{"tool": "turn", "arguments": {"number": number}} for number in (7, 42, 8)]
    record = rolled(tmp_path, EnvironmentScene(Safe, "Open the safe."), *script)
    assert (record.outcome, record.reward, record.calls) == (Outcome.OK, 0.75, 2)


def test_wrong_arguments_are_told_to_the_model(tmp_path: Path) -> None:
    record = rolled(tmp_path, EnvironmentScene(Notes, "Note."), {"tool": "add_note"}, {"text": "Done."})
    assert record.outcome is Outcome.OK
    assert "title" in record.transcript[3]["content"]


def test_an_environment_without_tools_is_stepped(tmp_path: Path) -> None:
    steps = [{"tool": "step", "arguments": {"amount": amount}} for amount in (2, 3)]
    record = rolled(tmp_path, EnvironmentScene(Counter, "Count."), *steps, {"text": "Done."})
    assert record.outcome is Outcome.OK
    assert '"total":5' in record.transcript[5]["content"]
