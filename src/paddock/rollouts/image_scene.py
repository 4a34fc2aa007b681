"""The scene of agent programs on an image: the stages are those of `SandboxScene`, the work is an `ImageWorkspace`.

install → image → sandbox → setup → agent → verifier

The stages from set-up on are repeated for each step of a task with steps.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paddock.agents.base import AgentExit
from paddock.errors import ImageError, RolloutError, SandboxError, TaskError, VerifierError
from paddock.rollouts.image_workspace import ImageWorkspace, WorkspaceOptions
from paddock.rollouts.recorder import LOG_BYTES
from paddock.rollouts.sandbox_scene import KEPT_BYTES, KEPT_TASK_BYTES, SPARE_SECONDS, SandboxScene
from paddock.sandbox import find_backend

if TYPE_CHECKING:
    from paddock.limits import RolloutTimeouts
    from paddock.rollouts.context import RunContext
    from paddock.rollouts.recorder import RolloutRecorder
    from paddock.rollouts.verifier import VerifierResult
    from paddock.sandbox.base import Sandbox
    from paddock.sandbox.images.dockerfiles.events import BuildEvent
    from paddock.sandbox.images.image import Image
    from paddock.tasks.steps import StepPlan
    from paddock.tasks.task import Task

IMAGE_STAGE = "image"


class ImageScene(SandboxScene):
    """The scene of a task with an image. `ImageWorkspace` has the sandbox."""

    def __init__(self, task: Task, context: RunContext, timeouts: RolloutTimeouts, recorder: RolloutRecorder) -> None:
        super().__init__(task, context, timeouts, recorder)
        config = context.config
        options = WorkspaceOptions(
            self._open_sandbox,
            find_backend(config.sandbox),
            config.timeouts,
            config.verifier_mode,
            agent_network=config.agent_network,
        )
        self._workspace = ImageWorkspace(task, options)
        self.steps = self._workspace.steps

    async def open(self) -> None:
        recorder, timeouts, workspace = self._recorder, self._timeouts, self._workspace
        self._warn()
        installed = await self._install()
        await self._prepare_image()
        async with recorder.stage("sandbox", timeouts.sandbox + SPARE_SECONDS, SandboxError):
            sandbox = await workspace.open(installed.mounts)
        self._take_sandbox(sandbox)
        async with recorder.stage("setup", timeouts.setup, TaskError):
            await workspace.set_up()
            # What the agent starts from, so that its changes can be shown later.
            with suppress(SandboxError, OSError):
                start = await sandbox.pack(sandbox.workdir, limit=KEPT_TASK_BYTES)
                self._record.task_blob = await recorder.put_blob(start)

    async def begin_step(self, plan: StepPlan) -> None:
        self._task, self._timeouts = plan.task, self._config.timeouts or plan.task.timeouts
        self._program, self._exit = None, AgentExit(None)
        seconds = self._timeouts.setup + self._timeouts.sandbox
        async with self._recorder.stage("setup", seconds, TaskError):
            self._take_sandbox(await self._workspace.begin_step(plan))
        if (separate := self._workspace.separate_verifier) is not None:
            self._record.verifier_image = describe_image(separate.image)

    def _take_sandbox(self, sandbox: Sandbox) -> None:
        self.agent_sandbox = sandbox
        self._record.sandbox_id, self._record.user_ids = sandbox.id, sandbox.user_ids
        self._record.limits = dict(sandbox.limits_enforced)

    async def _prepare_image(self) -> None:
        workspace, record = self._workspace, self._record
        seconds = workspace.build_seconds + SPARE_SECONDS
        separate = workspace.separate_verifiers.values()
        try:
            async with self._recorder.stage(IMAGE_STAGE, seconds, ImageError):
                await workspace.prepare_images(self._report_build)
            record.image = describe_image(workspace.image)
            for verifier in separate:
                record.verifier_image = describe_image(verifier.image)
        finally:
            record.build_log = self._recorder.mask.text(workspace.build_log.text)
            logs = "".join(verifier.build_log.text for verifier in separate)
            record.verifier_build_log = self._recorder.mask.text(logs)

    def _report_build(self, event: BuildEvent) -> None:
        if event.connection is not None:
            self._recorder.record_connection(event.connection)
        elif event.kind != "output":
            line = f"[{event.step}/{event.steps}] {event.kind}: {event.text}"
            self._recorder.emit("image", {"line": line[:LOG_BYTES]})

    async def stop_agent(self, exhausted: str | None) -> None:
        await self._read_agent()
        try:
            choice = await self._workspace.end_work()
        except RolloutError:
            await self._opened.kill()
            raise
        self._record.verifier = {"mode": choice.mode, "reason": self._recorder.mask.text(choice.reason)}
        self._record.usage = self._workspace.usage()

    async def seal(self) -> None:
        """Keep the artifacts, and the work folder for whoever looks at the rollout. The tests get the whole layer, or
        in a separate verifier the artifacts."""
        recorder, sandbox = self._recorder, self._opened
        await self._collect()
        try:
            entries = await sandbox.list(sandbox.workdir)
            files = sorted(entry.path for entry in entries if entry.kind != "folder")
            self._record.workdir_files = recorder.mask.value(files)
            work = await sandbox.pack(sandbox.workdir, limit=KEPT_BYTES)
            self._record.workdir_blob = await recorder.put_blob(work)
        except (SandboxError, OSError) as error:
            recorder.emit("warning", {"warning": f"the work folder is not kept: {error}"})
        await self._workspace.leave()

    async def _collect(self) -> None:
        recorder, record = self._recorder, self._record
        for problem in await self._workspace.collect():
            recorder.emit("warning", {"warning": recorder.mask.text(problem)})
        artifacts = self._workspace.artifacts
        record.artifacts = recorder.mask.value(await asyncio.to_thread(artifacts.files))
        if record.artifacts:
            record.artifact_blob = await recorder.put_blob(await asyncio.to_thread(artifacts.archive))
        record.usage = self._workspace.usage()

    async def verify(self) -> VerifierResult:
        seconds = self._timeouts.verifier + self._timeouts.sandbox
        async with self._recorder.stage("verifier", seconds, VerifierError):
            return await self._workspace.verify(keeps_running=self._has_more_steps)

    @property
    def _has_more_steps(self) -> bool:
        return bool(self.steps) and self._task is not self.steps[-1].task

    async def close(self) -> None:
        await self._workspace.close()


def describe_image(image: Image) -> dict[str, Any]:
    return {"name": image.name, "digest": image.digest, "platform": image.platform}
