"""What a task asks for that no sandbox here has. Such a task is not run: a score without it would be a false 0.

The loaders name these parts in `metadata["not_built"]`. Whoever runs or scores a task calls `check_can_run` first.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from paddock.errors import TaskError

if TYPE_CHECKING:
    from paddock.rollouts.task import Task

NOT_BUILT = "not_built"
IMAGE_NAME = "docker_image"
HARMLESS = (".dockerignore",)
"""Says nothing without a Dockerfile."""
HINT = "do what the image would do in environment/setup.sh, and take these parts out of the task"
USE_DOCKER = "run it with --sandbox docker and PADDOCK_DOCKER_IMAGE={image}"


def check_can_run(task: Task, sandbox: str) -> None:
    """Raises TaskError for a task that needs an image or a machine that `sandbox` does not give it."""
    missing = missing_parts(task, sandbox)
    if not missing:
        return
    image = task.metadata.get(IMAGE_NAME)
    hint = USE_DOCKER.format(image=image) if missing == [IMAGE_NAME] and image else HINT
    raise TaskError(f"task {task.id} cannot be run as it is written: it needs {', '.join(missing)}", hint=hint)


def missing_parts(task: Task, sandbox: str) -> list[str]:
    named = task.metadata.get(NOT_BUILT)
    parts = [str(part) for part in named if part not in HARMLESS] if isinstance(named, list) else []
    chosen = os.environ.get("PADDOCK_DOCKER_IMAGE") if sandbox == "docker" else None
    if chosen and chosen == task.metadata.get(IMAGE_NAME):
        # The image itself, wherever it was built: what it was built from is no longer needed.
        parts = [part for part in parts if part != IMAGE_NAME and not part.startswith("Dockerfile")]
    return parts
