"""What a task asks for that no sandbox here has. Such a task is not run: a score without it would be a false 0.

Whoever runs or scores a task calls `check_can_run` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddock.errors import TaskError
from paddock.sandbox import BACKENDS, find_backend
from paddock.sandbox.images.image import DOCKERFILE
from paddock.tasks.settings import MAIN_SERVICE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paddock.tasks.settings import EnvironmentSettings, TaskImage, TaskStep, VerifierSettings
    from paddock.tasks.task import Task

UNREADABLE = "unreadable"
"""The metadata of a task that stands for a folder of a set that cannot be read: `message` and `hint`."""
UNKNOWN_KEYS = "unknown_keys"
"""The metadata of a task that names keys of its task.toml which mean nothing."""
MISSPELLED_TABLES = "misspelled_tables"
"""The metadata of a task that names tables of its task.toml, such as `[agnt]`, which would be left out as a whole."""
MISSING_FILES = "missing_files"
"""The metadata of a task that says which of its files were not fetched."""
LFS_POINTER = b"version https://git-lfs."
LARGEST_POINTER = 1024
IMAGE_NAME = "docker_image"
SHOWN_FILES = 5
STEPS = "steps"
HINT = "take these parts out of the task"
NO_IMAGE_HINT = "give the task an image (environment/Dockerfile), or take these parts out of it"


def check_can_run(task: Task, sandbox: str) -> None:
    """Raises TaskError for a task that needs an image or a machine that `sandbox` does not give it, for a misspelled
    table in its task.toml, and for a member of a set that could not be read."""
    if isinstance(problem := task.metadata.get(UNREADABLE), dict):
        raise TaskError(f"task {task.id} cannot be read: {problem.get('message')}", hint=problem.get("hint"))
    if misspelled := task.metadata.get(MISSPELLED_TABLES):
        tables = ", ".join(map(str, misspelled)) if isinstance(misspelled, list) else str(misspelled)
        raise TaskError(
            f"task {task.id} cannot be run as it is written: task.toml has {tables}",
            hint="correct the name: what the table says would be left out",
        )
    absent = find_missing_files(task)
    if absent:
        raise TaskError(
            f"task {task.id} cannot be run as it is written: {'; '.join(absent[:SHOWN_FILES])}",
            hint="clone its repository with submodules and git lfs, and name the folder of the clone",
        )
    grader = task.settings.verifier.grader
    if grader is not None and grader.problem:
        raise TaskError(f"task {task.id} cannot be scored: {grader.problem}", hint=grader.hint)
    missing = missing_parts(task, sandbox)
    if not missing:
        return
    hint = HINT if task.image is not None else NO_IMAGE_HINT
    if task.image is not None and not supports_image(task.image, sandbox):
        able = [name for name in BACKENDS if supports_image(task.image, name)]
        hint = f"the {sandbox} backend cannot give it that: run it with --sandbox {' or '.join(able)}"
    elif missing == [STEPS] and task.image is not None:
        hint = "run it with --sandbox bwrap: other backends cannot keep the tests of a step apart from the next one"
    raise TaskError(f"task {task.id} cannot be run as it is written: it needs {', '.join(missing)}", hint=hint)


def find_missing_files(task: Task) -> list[str]:
    """The files that are not what the author stored: Git LFS pointers and submodules."""
    folders = {"environment": task.files, "tests": task.tests, "solution": task.solution}
    for step in task.steps:
        place = f"steps/{step.name}"
        folders |= {f"{place}/workdir": step.files, f"{place}/tests": step.tests, f"{place}/solution": step.solution}
    pointers = [
        f"{place}/{name} is a Git LFS pointer"
        for place, files in folders.items()
        for name, data in files.items()
        if len(data) <= LARGEST_POINTER and data.startswith(LFS_POINTER)
    ]
    listed = task.metadata.get(MISSING_FILES)
    return [*pointers, *(map(str, listed) if isinstance(listed, list) else [])]


def uses_image(task: Task, sandbox: str) -> bool:
    """Whether the sandboxes of a task have its image as their root."""
    return task.image is not None and supports_image(task.image, sandbox)


def supports_image(image: TaskImage, sandbox: str) -> bool:
    """Whether a backend can open sandboxes on the image that a task names, or build its Dockerfile."""
    backend = find_backend(sandbox)
    return backend.supports_images if image.name else backend.supports_dockerfiles


def find_warnings(task: Task) -> list[str]:
    """What the task says that has no effect here, and does not change its score."""
    keys = task.metadata.get(UNKNOWN_KEYS)
    unknown = [f"keys that have no effect: {', '.join(map(str, keys))}"] if isinstance(keys, list) and keys else []
    has_artifacts = task.settings.artifacts or any(step.artifacts for step in task.steps)
    is_left_out = has_artifacts and task.image is None
    return [*unknown, *(["artifacts, which are kept only for a task with an image"] if is_left_out else [])]


def describe_warnings(tasks: Iterable[Task]) -> list[str]:
    """The warnings of a set of tasks, each once."""
    task_ids: dict[str, list[str]] = {}
    for task in tasks:
        for warning in find_warnings(task):
            task_ids.setdefault(warning, []).append(task.id)
    return [
        f"task.toml of {ids[0]}{f' and {len(ids) - 1} more' if len(ids) > 1 else ''} has {warning}"
        for warning, ids in task_ids.items()
    ]


def missing_parts(task: Task, sandbox: str) -> list[str]:
    """The names of what is missing, each once, as task.toml has them."""
    on_image = uses_image(task, sandbox)
    parts = [*_image_part(task, sandbox), *_task_parts(task, on_image), *_steps_part(task, sandbox)]
    return list(dict.fromkeys(parts))


def _image_part(task: Task, sandbox: str) -> Iterator[str]:
    if task.image is None or uses_image(task, sandbox):
        return
    yield IMAGE_NAME if task.image.name else DOCKERFILE


def _steps_part(task: Task, sandbox: str) -> Iterator[str]:
    """Tests between steps run on a layer of their own."""
    if task.steps and not (uses_image(task, sandbox) and find_backend(sandbox).supports_layers):
        yield STEPS


def _task_parts(task: Task, on_image: bool) -> Iterator[str]:
    settings = task.settings
    yield from _environment_parts(settings.environment, "environment", on_image)
    yield from _verifier_parts(settings.verifier, on_image)
    if settings.agent.user and not on_image:
        yield "agent.user"
    services = {artifact.service for artifact in settings.artifacts}
    if services - {MAIN_SERVICE}:
        yield "artifacts.service"
    for step in task.steps:
        yield from _step_parts(step, on_image)


def _environment_parts(environment: EnvironmentSettings, place: str, on_image: bool) -> Iterator[str]:
    machine = environment.machine
    if machine.compose:
        yield machine.compose
    requested = {
        "gpus": machine.gpus,
        "gpu_types": machine.gpu_types,
        "tpu": machine.tpu,
        "os": machine.os != "linux",
    }
    if not on_image:
        requested |= {
            "env": environment.env,
            "workdir": environment.workdir,
            "healthcheck": environment.health_check,
        }
    yield from (f"{place}.{name}" for name, value in requested.items() if value)


def _verifier_parts(verifier: VerifierSettings, on_image: bool) -> Iterator[str]:
    if verifier.mode in ("separate", "live") and not on_image:
        yield "verifier.environment_mode"
    if verifier.environment is not None:
        yield from _environment_parts(verifier.environment, "verifier.environment", on_image)
    for name in () if on_image else ("env", "user", "collect"):
        if getattr(verifier, name):
            yield f"verifier.{name}"
    if any(collect.service != MAIN_SERVICE for collect in verifier.collect):
        yield "verifier.collect.service"


def _step_parts(step: TaskStep, on_image: bool) -> Iterator[str]:
    if any(artifact.service != MAIN_SERVICE for artifact in step.artifacts):
        yield "artifacts.service"
    yield from _verifier_parts(step.verifier, on_image)
