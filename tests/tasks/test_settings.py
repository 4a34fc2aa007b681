import dataclasses
from typing import Any

import pytest

from paddock.errors import TaskError
from paddock.limits import SandboxLimits
from paddock.sandbox.images.image import HealthCheck
from paddock.sandbox.network.policy import NetworkPolicy
from paddock.tasks.settings import (
    AgentSettings,
    Artifact,
    CollectCommand,
    EnvironmentSettings,
    Machine,
    McpServer,
    TaskImage,
    TaskNetwork,
    TaskSettings,
    TaskStep,
    VerifierSettings,
)
from paddock.tasks.task import Task

HOSTS = NetworkPolicy("allowlist", ("example.org",))
CHECK = HealthCheck(("/bin/sh", "-c", "true"), interval=1.0)
WHOLE = Task(
    "do it",
    id="whole",
    files={"app.py": b"1"},
    verifier="exit 0",
    image=TaskImage(dockerfile="FROM scratch\n"),
    network=TaskNetwork(environment=HOSTS, agent=NetworkPolicy(), verifier=NetworkPolicy("public")),
    settings=TaskSettings(
        environment=EnvironmentSettings(
            env={"A": "${HOME:-x}"},
            workdir="/app",
            build_timeout=60,
            health_check=CHECK,
            mcp_servers=(McpServer("m", "stdio", command="serve", args=("-v",)),),
            skills_dir="/skills",
            machine=Machine(gpus=1, gpu_types=("T4",), compose="docker-compose.yaml"),
        ),
        agent=AgentSettings("nobody"),
        verifier=VerifierSettings(
            "separate",
            {"B": "1"},
            "root",
            image=TaskImage("python:3.12"),
            environment=EnvironmentSettings(workdir="/check"),
            limits=SandboxLimits(cpus=1),
            collect=(CollectCommand("dump"),),
        ),
        solution_env={"C": "2"},
        artifacts=(Artifact("/app/out", "out", ("*.tmp",)),),
        reward_strategy="final",
    ),
    steps=(
        TaskStep("one", "first", {"a": b"\xff"}, {"test.sh": b"1"}, {"solve.sh": b"2"}, min_reward={"reward": 0.5}),
        TaskStep("two", "second", health_check=CHECK, artifacts=(Artifact("/b"),), network=TaskNetwork(agent=HOSTS)),
    ),
)


def test_all_settings_survive_json() -> None:
    again = Task.from_json(WHOLE.to_json())
    assert again == WHOLE
    assert again.hash == WHOLE.hash


@pytest.mark.parametrize(
    "change",
    [
        {"image": TaskImage("python:3.12")},
        {"network": TaskNetwork()},
        {"steps": WHOLE.steps[:1]},
        {"settings": dataclasses.replace(WHOLE.settings, agent=AgentSettings())},
        {"steps": (dataclasses.replace(WHOLE.steps[0], tests={"test.sh": b"9"}), WHOLE.steps[1])},
    ],
)
def test_settings_are_part_of_the_hash(change: dict[str, Any]) -> None:
    assert dataclasses.replace(WHOLE, **change).hash != WHOLE.hash


def test_solutions_are_not_part_of_the_hash() -> None:
    settings = dataclasses.replace(WHOLE.settings, solution_env={})
    steps = tuple(dataclasses.replace(step, solution={}) for step in WHOLE.steps)
    assert dataclasses.replace(WHOLE, settings=settings, steps=steps).hash == WHOLE.hash


@pytest.mark.parametrize(
    ("data", "says", "hint"),
    [
        ({"image": 5}, "image is 5", "names"),
        ({"image": {}}, "neither a name nor a Dockerfile", "one of them"),
        ({"image": {"nam": "x"}}, "image: unknown key 'nam'", "'name'"),
        ({"network": {"agent": {"mode": "open"}}}, "network.agent.mode is 'open'", "'public'"),
        ({"settings": {"environment": {"env": {"A": 1}}}}, "settings.environment.env.A is 1, not text", "write"),
        ({"settings": {"environment": {"mcp_servers": [{"name": "x"}]}}}, r"mcp_servers\[0\].*has no url", "url"),
        ({"settings": {"artifacts": [{"source": "../x"}]}}, r"artifacts\[0\].*'../x'", "without"),
        ({"steps": [{"name": "a"}]}, r"steps\[0\]: instruction is missing", "add"),
        ({"steps": {}}, "steps is an object", "write"),
        ({"steps": [{"name": "a/b", "instruction": "x"}]}, "not the name of a step", "folder"),
        ({"steps": [{"name": "a", "instruction": "x"}] * 2}, "two steps have the name 'a'", "own name"),
        ({"steps": [{"name": "a", "instruction": "x", "tests": {"../b": ""}}]}, "step a: tests", "relative"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(data: dict[str, Any], says: str, hint: str) -> None:
    with pytest.raises(TaskError, match=says) as caught:
        Task.from_json({"instruction": "x", **data})
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("network", "on_image", "modes"),
    [
        (TaskNetwork(), True, ["public", "public", "public", "public"]),
        (TaskNetwork(), False, ["no-network", "allowlist", "no-network", "no-network"]),
        (TaskNetwork(environment=NetworkPolicy()), True, ["public", "no-network", "no-network", "no-network"]),
        (TaskNetwork(agent=NetworkPolicy(), verifier=HOSTS), True, ["public", "public", "no-network", "allowlist"]),
    ],
)
def test_each_phase_has_its_network(network: TaskNetwork, on_image: bool, modes: list[str]) -> None:
    phases = ("build", "setup", "agent", "verifier")
    assert [network.policy(phase, on_image=on_image).mode for phase in phases] == modes  # type: ignore[arg-type]
