"""TRL's trainers, in their own virtual environment, train through each of our integrations."""

import json
import subprocess
from typing import Any

import pytest
from scripts.peers import REPOSITORY, peer_python

from .processes import HERE, free_port, paddock_command, quiet_environment, serving

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(400)]

GAME = REPOSITORY / "examples" / "grpo_tiny" / "game.py"
SECONDS = 300.0
MEMBERS = 8


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    port, log = free_port(), tmp_path_factory.mktemp("servers") / "game.log"
    command = [*paddock_command(f"{GAME}:Game", port), "--max-sessions", "64"]
    with serving("paddock", command, port, log) as server:
        script = [peer_python("trl"), HERE / "clients" / "trl_integrations.py", server.url]
        finished = subprocess.run(
            script, capture_output=True, text=True, timeout=SECONDS, env=quiet_environment(), check=False
        )
    assert finished.returncode == 0, finished.stderr[-4000:]
    answer: dict[str, Any] = json.loads(finished.stdout)
    return answer


def test_tools_of_an_environment_are_methods_with_their_schema(answers: dict[str, Any]) -> None:
    answer = answers["environment_factory"]
    assert "failed" not in answer, answer
    assert answer["schema"]["name"] == "guess"
    assert answer["schema"]["description"] == "Guess the hidden number."
    number = {"type": "integer", "description": "The guess."}
    assert answer["schema"]["parameters"] == {
        "type": "object",
        "properties": {"number": number},
        "required": ["number"],
    }


def test_grpo_trainer_plays_in_the_environment_and_learns_from_its_reward(answers: dict[str, Any]) -> None:
    answer = answers["environment_factory"]
    assert answer["moved"]
    assert len(answer["log"]) == 2
    for entry in answer["log"]:
        assert entry["reward"] == entry["rewards/Game/mean"]
        assert 1 <= entry["tools/call_frequency"] <= 4
        assert entry["tools/failure_frequency"] == 0
    assert any(entry["reward"] > 0 for entry in answer["log"])


def test_environments_are_pooled_and_can_be_made_again_in_another_process(answers: dict[str, Any]) -> None:
    answer = answers["environment_factory"]
    assert answer["pooled"] == 2 * MEMBERS
    assert answer["again"] == [False, "Game", True]


def test_rollouts_give_the_trainer_exactly_what_was_sampled(answers: dict[str, Any]) -> None:
    answer = answers["rollout_func"]
    assert "failed" not in answer, answer
    assert answer["difference"] < 1e-5
    assert answer["masked"] == answer["sampled"] > 0
    assert [entry["reward"] for entry in answer["log"]] == pytest.approx(answer["rewards"])
    assert answer["moved"]


def test_the_worker_is_what_the_asynchronous_trainer_asks_for(answers: dict[str, Any]) -> None:
    answer = answers["rollout_worker"]
    assert "failed" not in answer, answer
    assert answer["lacking"] == []
    assert sorted(answer["groups"].count(group) for group in set(answer["groups"])) == [MEMBERS, MEMBERS]
    assert answer["off"] < 1e-6
    assert all(ids == mask == logprobs for ids, mask, logprobs in answer["lengths"])
    assert all(trained > 0 for trained in answer["trained"])
    assert answer["given"] == 0
    assert answer["batched"] == 1
    assert answer["metrics"] == ["rollout/reward_mean", "rollout/sequences", "rollout/staleness"]


def test_the_worker_follows_the_versions_of_the_trainer_and_drops_nothing(answers: dict[str, Any]) -> None:
    answer = answers["rollout_worker"]
    assert answer["later"] == 2 * MEMBERS
    assert answer["acknowledged"] >= 6
    assert answer["dropped"] == 0
    assert answer["staleness"] <= 1


def test_a_worker_that_has_stopped_is_not_healthy(answers: dict[str, Any]) -> None:
    assert answers["rollout_worker"]["stopped"] == "RolloutError"
