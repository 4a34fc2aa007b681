"""Exports are what the trainers' own packages take, and our integrations with SkyRL and verl work.

All of them run in one process: importing torch for each would take longer than everything else.
"""

import json
import subprocess
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from scripts.peers import peer_python

from export.rollouts import END, conversation, forked, record
from paddock.export.stream import export
from paddock.store import Store

from .processes import HERE, free_port, paddock_command, quiet_environment, serving

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]

SECONDS = 200.0
COUNT = {"tool": "act", "arguments": {"amount": 6}}
SCRIPT = {"turns": [{"text": "counting", **COUNT}, {"text": "and again", **COUNT}, {"text": "Done."}]}


def filled(folder: Path) -> Path:
    with Store.open(folder) as store:
        for number, (reward, calls) in enumerate([(0.5, conversation(3)), (1.0, forked()), (None, conversation(2))]):
            about = record(f"r{number}", reward, member=number, started_at=float(number))
            outcome, about.outcome = about.outcome, None
            store.begin(about)
            for call in calls:
                store.save_call(about.rollout_id, call)
            about.outcome = outcome
            store.finish(about)
    return folder


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trainers")
    (folder / "script.json").write_text(json.dumps(SCRIPT))
    port = free_port()
    with serving("paddock", paddock_command("counter", port), port, folder / "counter.log") as server:
        command = [peer_python("trainers"), HERE / "clients" / "trainer_forms.py"]
        finished = subprocess.run(
            [*command, filled(folder / "store"), server.url, folder / "script.json"],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=quiet_environment(),
            check=False,
        )
    assert finished.returncode == 0, finished.stderr[-4000:]
    output: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return output


def answer(answers: dict[str, Any], name: str) -> Any:
    parsed = answers[name]
    assert not (isinstance(parsed, dict) and "failed" in parsed), parsed["failed"]
    return parsed


@pytest.mark.parametrize(
    ("form", "documents"),
    [("trl", 4), ("skyrl", 2), ("verl", 4), ("tinker", 4), ("verifiers", 2), ("atif", 2), ("parquet", 4)],
)
def test_the_package_takes_every_document(answers: dict[str, Any], form: str, documents: int) -> None:
    assert answer(answers, "checked")[form] == [documents, documents, 0, []]


def test_skyrl_joins_the_rollouts(answers: dict[str, Any]) -> None:
    assert answer(answers, "skyrl_joins") == {"rows": 4, "last": 2, "rewards": [0.5, 1.0, 1.0, 1.0]}


def test_verl_makes_tensors_with_the_reward_at_the_end(answers: dict[str, Any]) -> None:
    first, second, third, fourth = answer(answers, "verl_tensors")
    mask = [1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]
    assert first == [3, mask, 0.5]
    assert second == [3, mask, 1.0]
    assert (third, fourth) == ([2, [1, 1], 1.0], [7, [1, 1, 1], 1.0])


def test_tinkers_cookbook_makes_the_same_data(answers: dict[str, Any]) -> None:
    assert answer(answers, "tinker_agrees") == [True] * 4


def test_verifiers_walks_the_same_branches(answers: dict[str, Any]) -> None:
    first, second = answer(answers, "verifiers_branches")
    whole = [1, 2, 3, 100, 200, END, 60, 101, 201, END, 61, 102, 202, END]
    assert first == [0.5, [[whole, [0] * 3 + [1] * 3 + [0] + [1] * 3 + [0] + [1] * 3]]]
    assert [[1, 2, 3, 100, 200, END, 77, 51, 52, END], [0] * 3 + [1] * 3 + [0] + [1] * 3] in second[1]


def test_datasets_reads_the_parquet_file(answers: dict[str, Any]) -> None:
    assert answer(answers, "parquet_reads") == [
        ["r0", 0.5, 11, 9],
        ["r1", 1.0, 11, 9],
        ["r1", 1.0, 2, 2],
        ["r1", 1.0, 3, 3],
    ]


def test_skyrl_gym_plays_an_environment(answers: dict[str, Any]) -> None:
    result = answer(answers, "skyrl_text_env")
    assert result["roles"][:2] == ["system", "user"]
    assert result["rewards"] == [3.0, 3.0, 0.0]
    assert result["done"] == [False, False, True]
    assert '"total":3' in result["said"].replace(" ", "")
    assert result["unknown"] == [0.0, "Error: there is no tool 'jump'. Tools: act"]
    assert result["metrics"] == {"turns": 4, "reward": 6.0}


def test_skyrl_generates_with_our_rollouts(answers: dict[str, Any]) -> None:
    result = answer(answers, "skyrl_generator")
    assert {reward for reward, last in zip(result["rewards"], result["last"], strict=True) if last} == {12.0}
    assert sum(result["last"]) == 2
    assert result["metrics"]["paddock/unscored"] == 0
    assert result["versions"] == ["7"]


def test_verl_runs_our_loop(answers: dict[str, Any]) -> None:
    result = answer(answers, "verl_loop")
    assert result["kinds"] == [True, True]
    assert result["reward"] == 12.0
    assert result["steps"] == [3, 3]
    assert len(set(result["lengths"])) == 1
    assert result["trained"] > 0


def test_verl_makes_our_loop_from_its_config_and_gets_no_more_tokens_than_it_takes(answers: dict[str, Any]) -> None:
    result = answer(answers, "verl_makes_our_loop")
    assert result["rewards"] == [12.0] * 3
    assert result["task"] == "counting"
    assert result["lengths"] == [[5, 60]] * 3
    assert (result["masked"], result["cut"]) == (0, True)
    assert result["shared"] == 2


def test_skyrl_generates_in_two_environments_at_once(answers: dict[str, Any]) -> None:
    result = answer(answers, "skyrl_generates_at_once")
    assert result["rewards"] == [[12.0], [6.0]]
    assert result["versions"] == [3, 3]
    assert result["times"] == [2, 2]


def test_verl_gets_the_versions_of_its_servers(answers: dict[str, Any]) -> None:
    assert answer(answers, "verl_asks_the_servers") == {"reward": 12.0, "steps": [5, 6]}


def test_tinkers_cookbook_samples_for_our_rollouts(answers: dict[str, Any]) -> None:
    result = answer(answers, "tinker_groups")
    assert result["rewards"] == [1.0, 1.0]
    assert result["turns"] == result["calls"] == [2, 2]
    assert result["data"] == [1, 1]
    assert result["stop"] == ["completed", "completed"]


def test_openenv_takes_its_training_trace(tmp_path: Path) -> None:
    check = (
        "import sys; from openenv.core.harness.training import TrainingTrace\n"
        "print([len(TrainingTrace.model_validate_json(line).turns) for line in sys.stdin])"
    )
    out = BytesIO()
    with Store.open(filled(tmp_path / "store")) as store:
        export(store, "openenv", out)
    finished = subprocess.run(
        [peer_python("openenv"), "-c", check], input=out.getvalue(), capture_output=True, timeout=60, check=False
    )
    assert finished.stdout.strip() == b"[3, 5]", finished.stderr[-2000:]
