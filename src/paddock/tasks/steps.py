"""A task with steps, one step at a time: the task as it is in each of them.

As in Harbor, a step uses what the task says unless it says otherwise. Its tests replace those of the task with the
same name, and so do its variables. Runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paddock.sandbox.images.image import DOCKERFILE
from paddock.tasks.settings import AgentSettings, TaskNetwork

if TYPE_CHECKING:
    from paddock.limits import RolloutTimeouts
    from paddock.tasks.settings import TaskStep, VerifierSettings
    from paddock.tasks.task import Task

"""Among the tests: builds the image of a separate verifier."""
SETUP_ENTRY = "setup.sh"
"""Among the files of a step: run in the work folder before the agent."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of a task, ready to be run."""

    step: TaskStep
    """With what is prepared before the step: its files and its health check."""
    task: Task
    """The task as it is in this step: instruction, tests, solution, deadlines and settings. It has no steps."""
    number: int
    """From 1."""

    @property
    def name(self) -> str:
        return self.step.name


def plan_steps(task: Task) -> tuple[StepPlan, ...]:
    """In their order; empty for a task without steps."""
    return tuple(StepPlan(step, _task_in_step(task, step), number) for number, step in enumerate(task.steps, start=1))


def join_instructions(task: Task) -> str:
    """All that the agent of a task is asked, for those who read it. With steps, each has a heading."""
    if not task.steps:
        return task.instruction
    return "\n\n".join(f"# {step.name}\n\n{step.instruction.strip()}" for step in task.steps)


def _task_in_step(task: Task, step: TaskStep) -> Task:
    settings = task.settings
    agent = AgentSettings(step.agent.user or settings.agent.user)
    return replace(
        task,
        instruction=step.instruction,
        tests={**task.tests, **step.tests},
        solution=step.solution or task.solution,
        timeouts=_timeouts(task.timeouts, step),
        network=TaskNetwork(
            task.network.environment,
            step.network.agent or task.network.agent,
            step.network.verifier or task.network.verifier,
        ),
        settings=replace(
            settings,
            agent=agent,
            verifier=_verifier(settings.verifier, step),
            artifacts=(*settings.artifacts, *step.artifacts),
        ),
        steps=(),
    )


def _timeouts(timeouts: RolloutTimeouts, step: TaskStep) -> RolloutTimeouts:
    return replace(
        timeouts,
        agent=timeouts.agent if step.agent.timeout is None else step.agent.timeout,
        verifier=timeouts.verifier if step.verifier.timeout is None else step.verifier.timeout,
    )


def _verifier(task: VerifierSettings, step: TaskStep) -> VerifierSettings:
    own = step.verifier
    placed = own if own.environment is not None else task
    inherited = None if own.shared and task.mode == "separate" else task.mode
    return replace(
        task,
        mode=own.mode or inherited,
        env={**task.env, **own.env},
        user=own.user or task.user,
        image=own.image or (None if DOCKERFILE in step.tests else task.image),
        environment=placed.environment,
        limits=placed.limits,
        collect=(*task.collect, *own.collect),
        grader=own.grader or task.grader,
    )
