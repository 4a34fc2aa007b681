"""The images that the tasks of a set need: those they name, and the bases of their Dockerfiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddock.errors import ImageError
from paddock.sandbox.images.dockerfiles.dockerfile import parse_dockerfile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paddock.tasks.settings import TaskImage
    from paddock.tasks.task import Task

SCRATCH = "scratch"


def find_image_names(tasks: Iterable[Task]) -> list[str]:
    """Each name once, in the order of the tasks. A base that depends on an ARG is left to the build."""
    return list(dict.fromkeys(name for task in tasks for source in _sources(task) for name in _names(source)))


def _sources(task: Task) -> Iterator[TaskImage]:
    verifiers = [task.settings.verifier, *(step.verifier for step in task.steps)]
    yield from (image for image in (task.image, *(verifier.image for verifier in verifiers)) if image is not None)


def _names(source: TaskImage) -> Iterator[str]:
    if source.name:
        yield source.name
        return
    try:
        dockerfile = parse_dockerfile(source.dockerfile)
    except ImageError:
        return  # `paddock tasks check` says what is wrong with it
    for stage in dockerfile.stages:
        is_stage = dockerfile.find_stage(stage.base, before=stage.position) is not None
        if stage.base.lower() != SCRATCH and not is_stage and "$" not in stage.base:
            yield stage.base
