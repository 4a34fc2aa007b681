"""What a step takes over from its task, and what it replaces."""

import pytest

from paddock.sandbox.network.policy import NetworkPolicy
from paddock.tasks.settings import (
    AgentSettings,
    Artifact,
    TaskImage,
    TaskNetwork,
    TaskSettings,
    TaskStep,
    VerifierMode,
    VerifierSettings,
)
from paddock.tasks.steps import join_instructions, plan_steps
from paddock.tasks.task import Task

PUBLIC, NONE = NetworkPolicy("public"), NetworkPolicy()
TASK = Task(
    "all of it",
    id="t",
    tests={"test.sh": "shared", "helper.py": "shared"},
    solution={"solve.sh": "shared"},
    network=TaskNetwork(environment=NONE, agent=PUBLIC),
    settings=TaskSettings(
        agent=AgentSettings("root"),
        verifier=VerifierSettings(env={"A": "1", "B": "1"}, user="root"),
        artifacts=(Artifact("/a"),),
    ),
    steps=(
        TaskStep("plain", "first"),
        TaskStep(
            "own",
            "second",
            tests={"test.sh": b"own"},
            solution={"solve.sh": b"own"},
            agent=AgentSettings("bob", 7.0),
            verifier=VerifierSettings(env={"B": "2"}, user="bob", timeout=8.0),
            network=TaskNetwork(agent=NONE, verifier=PUBLIC),
            artifacts=(Artifact("/b"),),
        ),
    ),
)


def test_a_step_uses_what_the_task_says() -> None:
    plain = plan_steps(TASK)[0].task
    assert (plain.instruction, plain.tests, plain.solution) == ("first", TASK.tests, TASK.solution)
    assert (plain.network, plain.timeouts) == (TASK.network, TASK.timeouts)
    assert plain.settings == TASK.settings


def test_a_step_replaces_what_it_says_itself() -> None:
    own = plan_steps(TASK)[1].task
    assert (own.instruction, own.steps) == ("second", ())
    assert own.tests == {"test.sh": b"own", "helper.py": b"shared"}
    assert own.solution == {"solve.sh": b"own"}
    assert (own.timeouts.agent, own.timeouts.verifier) == (7.0, 8.0)
    assert own.network == TaskNetwork(NONE, NONE, PUBLIC)
    assert (own.settings.agent.user, own.settings.verifier.user) == ("bob", "bob")
    assert own.settings.verifier.env == {"A": "1", "B": "2"}
    assert own.settings.artifacts == (Artifact("/a"), Artifact("/b"))


@pytest.mark.parametrize(
    ("task", "step", "mode"),
    [
        (VerifierSettings("separate"), VerifierSettings(), "separate"),
        (VerifierSettings("separate"), VerifierSettings(shared=True), None),
        (VerifierSettings("live"), VerifierSettings(shared=True), "live"),
        (VerifierSettings(), VerifierSettings("separate", image=TaskImage("own")), "separate"),
    ],
)
def test_the_mode_of_a_step(task: VerifierSettings, step: VerifierSettings, mode: VerifierMode | None) -> None:
    made = Task("x", settings=TaskSettings(verifier=task), steps=(TaskStep("s", "go", verifier=step),))
    assert plan_steps(made)[0].task.settings.verifier.mode == mode


def test_instructions_are_joined_under_the_names_of_their_steps() -> None:
    assert join_instructions(TASK) == "# plain\n\nfirst\n\n# own\n\nsecond"
    assert join_instructions(Task("only this")) == "only this"
