"""The separate verifier: runs the tests of a task on an image of their own.

It sees the artifacts at the places where the agent had them, and nothing else of the agent's sandbox. Its image is
the one that `[verifier.environment]` names, or that `tests/Dockerfile` builds, or else a fresh copy of the task's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from paddock.errors import SandboxError
from paddock.rollouts.health import wait_until_healthy
from paddock.rollouts.image_tests import NONINTERACTIVE, RESET_SECONDS, run_image_tests, script_modes
from paddock.rollouts.task_image import prepare_image
from paddock.rollouts.verifier import ENTRY, VerifierResult
from paddock.sandbox.base import TESTS, Command, SandboxSpec
from paddock.sandbox.images.dockerfiles.events import BuildLog
from paddock.sandbox.images.image import DOCKERFILE
from paddock.sandbox.images.provider import BuildRequest
from paddock.store.outcome import Reward
from paddock.tasks.settings import TaskImage
from paddock.tasks.variables import expand_defaults

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paddock.rollouts.artifacts import Artifacts
    from paddock.rollouts.image_workspace import WorkspaceOptions
    from paddock.sandbox.base import Sandbox
    from paddock.sandbox.images.dockerfiles.events import BuildEvent
    from paddock.sandbox.images.image import Image
    from paddock.tasks.task import Task

LARGEST_SCRIPT = 1024 * 1024


class SeparateVerifier:
    """Use: `prepare_image` before the agent begins, `run` when its sandbox is closed."""

    def __init__(self, task: Task, options: WorkspaceOptions) -> None:
        self.build_log = BuildLog()
        self._task, self._options = task, options
        self._verifier = task.settings.verifier
        self._environment = self._verifier.environment or task.settings.environment
        dockerfile = task.tests.get(DOCKERFILE, b"").decode("utf-8", "replace")
        self._own_image = self._verifier.image or (TaskImage(dockerfile=dockerfile) if dockerfile.strip() else None)
        """None: the image of the task."""
        self._image: Image | None = None

    @property
    def build_seconds(self) -> float:
        return 0.0 if self._own_image is None else self._environment.build_timeout

    @property
    def image(self) -> Image:
        assert self._image is not None, "prepare_image comes first"
        return self._image

    async def prepare_image(self, task_image: Image, on_progress: Callable[[BuildEvent], None] | None = None) -> None:
        """Pull or build the image, if it is not that of the task. Raises ImageError."""
        if self._own_image is None:
            self._image = task_image
            return
        tests = self._task.tests
        request = BuildRequest(
            dockerfile=self._own_image.dockerfile,
            files=tests,
            modes=script_modes(tests),
            network=self._options.network(self._task, "build"),
            timeout=self._environment.build_timeout,
            on_progress=self.build_log.recorder(on_progress),
        )
        self._image = await prepare_image(self._own_image.name, request, self._options.backend.image_provider())

    async def run(self, artifacts: Artifacts, layer: Path | None) -> VerifierResult:
        """Run the tests in a new sandbox that writes to `layer`. Raises SandboxError, or TaskError if its health
        check fails. With an artifact beyond the limit the reward is unknown."""
        if artifacts.too_large is not None:
            return VerifierResult(Reward.unknown(artifacts.too_large))
        async with self._options.open_sandbox(self._spec(layer)) as sandbox:
            await sandbox.set_network(self._options.network(self._task, "verifier"), phase="verifier")
            await artifacts.place(sandbox)
            if self._verifier.environment is not None and self._environment.health_check is not None:
                await wait_until_healthy(sandbox, self._environment.health_check)
            has_tests = self._own_image is not None and await use_own_tests(sandbox)
            return await run_image_tests(
                sandbox,
                {} if has_tests else self._task.tests,
                env={**NONINTERACTIVE, **expand_defaults(self._verifier.env, "verifier.env")},
                user=self._verifier.user or self.image.config.user or "root",
                timeout=(self._options.timeouts or self._task.timeouts).verifier,
            )

    def _spec(self, layer: Path | None) -> SandboxSpec:
        config = self.image.config
        workdir = PurePosixPath(self._environment.workdir) if self._environment.workdir else config.workdir
        return SandboxSpec(
            limits=self._verifier.limits or self._task.sandbox,
            env=expand_defaults(self._environment.env, "verifier.environment.env"),
            image=replace(self.image, config=replace(config, workdir=workdir)),
            writable_layer=layer,
            network=self._options.network(self._task, "verifier"),
            phase="verifier",
        )


async def use_own_tests(sandbox: Sandbox) -> bool:
    """Whether the image has a test script. If so, it can be run afterwards. Raises SandboxError."""
    script = TESTS / ENTRY
    try:
        await sandbox.read(script, limit=LARGEST_SCRIPT)
    except FileNotFoundError:
        return False
    argv = ["/bin/chmod", "+x", str(script)]
    done = await sandbox.exec(Command(argv, cwd=PurePosixPath("/"), user="root"), timeout=RESET_SECONDS)
    if done.exit_code != 0:
        raise SandboxError(f"{script} cannot be made executable: {done.stderr.decode(errors='replace')[-300:]}")
    return True
