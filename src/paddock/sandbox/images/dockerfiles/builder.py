"""Builds the stages of a Dockerfile, step by step.

A step that changes files (RUN, COPY, ADD, WORKDIR) is a layer. Its id is a hash of the layers below and of everything
that the step depends on, so an unchanged step is found in the store. Other instructions only change the config.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from paddock.errors import ImageError, SandboxError
from paddock.sandbox.base import Mount
from paddock.sandbox.images.dockerfiles.copy_job import CopyJob, CopyTarget
from paddock.sandbox.images.dockerfiles.copy_step import CopyStep, read_copy
from paddock.sandbox.images.dockerfiles.dockerfile import SCRATCH, Dockerfile, RunMount, Stage, parse_mounts
from paddock.sandbox.images.dockerfiles.events import BuildEvent
from paddock.sandbox.images.dockerfiles.expansion import Expander
from paddock.sandbox.images.dockerfiles.layer_copy import CopyRequest
from paddock.sandbox.images.dockerfiles.run_step import RunStep, read_run, run_step, script_mount
from paddock.sandbox.images.dockerfiles.scope import CHANGES, BuildInputs, BuildScope, read_global_args
from paddock.sandbox.images.dockerfiles.step_lock import lock_step
from paddock.sandbox.images.dockerfiles.syntax import Instruction, line_error, unsupported
from paddock.sandbox.images.image import Image, ImageConfig
from paddock.sandbox.images.layer_worker import set_rights
from paddock.sandbox.images.oci import config_to_json, digest_of
from paddock.sandbox.images.resolve import get_image
from paddock.shielded import run_shielded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from paddock.limits import SandboxLimits
    from paddock.sandbox.images.dockerfiles.context import SourceTree
    from paddock.sandbox.images.store import ImageStore
    from paddock.sandbox.network.connections import ConnectionRecord
    from paddock.sandbox.network.policy import NetworkPolicy

KEY_VERSION = 1
"""Raise it when a step with the same inputs gives another layer than before."""
MAX_LAYERS = 400
FILE_STEPS = ("RUN", "COPY", "ADD", "WORKDIR")


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a stage has become so far."""

    layers: tuple[str, ...]
    scope: BuildScope

    @property
    def config(self) -> ImageConfig:
        return self.scope.config

    def to_image(self, name: str, platform: str) -> Image:
        content = config_to_json(self.layers, self.config, platform)
        return Image(name, digest_of(content), self.layers, self.config, platform)


class Builder:
    """One build."""

    def __init__(
        self,
        dockerfile: Dockerfile,
        tree: SourceTree,
        inputs: BuildInputs,
        *,
        network: NetworkPolicy,
        limits: SandboxLimits,
        store: ImageStore,
        on_progress: Callable[[BuildEvent], None] | None,
        use_cache: bool,
    ) -> None:
        self._dockerfile = dockerfile
        self._tree = tree
        self._inputs = inputs
        self._network = network
        self._limits = limits
        self._store = store
        self._on_progress = on_progress
        self._use_cache = use_cache
        self._global_args = read_global_args(dockerfile.global_args, inputs, dockerfile.escape)
        self._results: dict[int, StageResult] = {}
        self._images: dict[str, Image] = {}
        self._step = 0
        self._steps = 0
        self.instruction: Instruction | None = None
        """The step that is being built."""
        self._locks_folder = store.folder / "locks"
        self._locks_folder.mkdir(mode=0o700, exist_ok=True)

    async def build(self, stage: Stage, name: str | None) -> Image:
        self._steps = sum(
            1 for one in self._needed_stages(stage) for line in one.instructions if line.keyword in FILE_STEPS
        )
        result = await self._build_stage(stage)
        image = result.to_image("", self._inputs.platform)
        image = replace(image, name=name or f"paddock-build:{image.digest.removeprefix('sha256:')[:24]}")
        await asyncio.to_thread(self._store.save, image, source="build")
        return image

    # -- stages ---------------------------------------------------------------------------------------

    def _needed_stages(self, stage: Stage) -> list[Stage]:
        """A stage and those that it is made from, as far as their names have no variables of a stage."""
        needed: dict[int, Stage] = {}
        waiting = [stage]
        while waiting:
            current = waiting.pop()
            if current.position in needed:
                continue
            needed[current.position] = current
            names = [self._expand_base(current)]
            for instruction in current.instructions:
                names += [value or "" for flag, value in instruction.flags if flag == "from"]
                if instruction.keyword == "RUN":
                    names += [mount.options.get("from", "") for mount in parse_mounts(instruction)]
            stages = (self._dockerfile.find_stage(name, before=current.position) for name in names if name)
            waiting += [one for one in stages if one is not None]
        return list(needed.values())

    def _expand_base(self, stage: Stage) -> str:
        return Expander(self._global_args, self._dockerfile.escape, stage.line).expand(stage.base)

    async def _build_stage(self, stage: Stage) -> StageResult:
        if stage.position not in self._results:
            result = await self._start_stage(stage)
            for instruction in stage.instructions:
                result = await self._apply(stage, instruction, result)
            self._results[stage.position] = result
        return self._results[stage.position]

    async def _start_stage(self, stage: Stage) -> StageResult:
        base = self._expand_base(stage)
        if not base:
            raise line_error(stage.line, f"FROM {stage.base} has no value", "give the ARG a default, or --build-arg")
        scope = BuildScope(self._inputs, self._global_args, self._dockerfile.escape)
        platform = Expander(self._global_args, self._dockerfile.escape, stage.line).expand(stage.platform)
        if base == SCRATCH:
            return StageResult((), scope)
        earlier = self._dockerfile.find_stage(base, before=stage.position) if not base.isdigit() else None
        if earlier is not None:
            result = await self._build_stage(earlier)
            return StageResult(result.layers, replace(scope, config=result.config))
        image = await self._get_image(base, platform, stage.line)
        if image.config.on_build:
            message = f"{base} has ONBUILD instructions, which are not supported: {image.config.on_build[0]}"
            raise unsupported(stage.line, message, "use another base, and write its instructions here")
        return StageResult(image.layers, replace(scope, config=image.config))

    async def _get_image(self, name: str, platform: str, line: int, *, stages: Sequence[str] = ()) -> Image:
        """`stages`: those that could have been meant instead."""
        key = f"{name} {platform}"
        if key not in self._images:
            try:
                self._images[key] = await get_image(name, platform=platform or None, store=self._store)
            except ImageError as error:
                hint = error.hint or f"paddock image pull {name}"
                hint += f"; stages that can be named here: {', '.join(stages)}" if stages else ""
                raise line_error(line, error.message, hint, fault="image-not-available") from error
        return self._images[key]

    async def _find_source(self, name: str, stage: Stage, line: int) -> tuple[str, ...]:
        """The layers of the stage or image that `--from` names."""
        earlier = self._dockerfile.find_stage(name, before=stage.position)
        if earlier is not None:
            return (await self._build_stage(earlier)).layers
        if name.isdigit() or name.lower() in {one.name for one in self._dockerfile.stages if one.name}:
            raise line_error(line, f"stage {name} does not come before this one", "copy from an earlier stage")
        earlier_names = [one.name for one in self._dockerfile.stages[: stage.position] if one.name]
        return (await self._get_image(name, "", line, stages=earlier_names)).layers

    # -- steps ----------------------------------------------------------------------------------------

    async def _apply(self, stage: Stage, instruction: Instruction, result: StageResult) -> StageResult:
        self.instruction = instruction
        if instruction.keyword == "RUN":
            return await self._run(stage, instruction, result)
        if instruction.keyword in ("COPY", "ADD"):
            return await self._copy(stage, instruction, result)
        scope = CHANGES[instruction.keyword](result.scope, instruction)
        if instruction.keyword == "WORKDIR":
            return await self._make_workdir(stage, instruction, StageResult(result.layers, scope))
        return StageResult(result.layers, scope)

    async def _make_workdir(self, stage: Stage, instruction: Instruction, result: StageResult) -> StageResult:
        path = str(result.config.workdir)
        # As in BuildKit, a new folder belongs to the user of the commands.
        request = CopyRequest(path, owner=result.config.user, makes_folder_only=True)

        async def make(staged: Path) -> None:
            await self._run_copy(result.layers, staged, request)

        inputs = {"folder": path, **({"owner": request.owner} if request.owner else {})}
        return await self._make_layer(stage, instruction, result, inputs, make)

    async def _copy(self, stage: Stage, instruction: Instruction, result: StageResult) -> StageResult:
        step = read_copy(instruction, result.scope, self._tree)
        source_layers = await self._find_source(step.source, stage, instruction.line) if step.source else None
        inputs = {**await self._read_inputs(instruction, step.key_inputs), "source_layers": source_layers}

        async def make(staged: Path) -> None:
            await self._run_copy(result.layers, staged, step.request, step=step, source_layers=source_layers)

        return await self._make_layer(stage, instruction, result, inputs, make)

    async def _run_copy(
        self,
        lower: tuple[str, ...],
        staged: Path,
        request: CopyRequest,
        *,
        step: CopyStep | None = None,
        source_layers: tuple[str, ...] | None = None,
    ) -> None:
        with ExitStack() as stack:
            layers = stack.enter_context(self._store.hold(self._image_of(lower)))
            sources = None
            if source_layers is not None:
                sources = stack.enter_context(self._store.hold(self._image_of(source_layers)))
            job = CopyJob(
                CopyTarget(self._store.folder, layers, staged, self._store.identity),
                request,
                source_layers=sources,
                write_files=step.write_files if step is not None and sources is None else None,
            )
            await job.run(timeout=self._limits.cpu_seconds)

    async def _run(self, stage: Stage, instruction: Instruction, result: StageResult) -> StageResult:
        step = read_run(instruction, result.scope)
        sources = {}
        for mount in step.mounts:
            if mount.kind == "bind" and mount.options.get("from"):
                sources[mount.target] = await self._find_source(mount.options["from"], stage, instruction.line)
        read_inputs = partial(step.key_inputs, result.scope, self._tree)
        inputs = {**await self._read_inputs(instruction, read_inputs), "mount_layers": sources}

        async def make(staged: Path) -> None:
            await self._execute(step, result, staged, sources)

        return await self._make_layer(stage, instruction, result, inputs, make)

    async def _read_inputs(self, instruction: Instruction, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What a step depends on. It reads all files that the step takes, so it has a thread."""
        try:
            return await asyncio.to_thread(read)
        except OSError as error:
            hint = "check the name, the rights and .dockerignore"
            message = f"{instruction.text}: {error.filename or error} cannot be read"
            raise line_error(instruction.line, message, hint) from error

    async def _execute(
        self, step: RunStep, result: StageResult, staged: Path, sources: dict[str, tuple[str, ...]]
    ) -> None:
        def report(text: str) -> None:
            self._report("output", step.instruction, text)

        def report_connection(record: ConnectionRecord) -> None:
            self._report("connection", step.instruction, record.host, connection=record)

        async with AsyncExitStack() as stack:
            mounts = [await self._open_mount(stack, mount, sources.get(mount.target)) for mount in step.mounts]
            if step.script:
                mounts.append(stack.enter_context(script_mount(step.script)))
            await run_step(
                step,
                image=result.to_image("build step", self._inputs.platform),
                staged=staged,
                network=self._network,
                limits=self._limits,
                mounts=tuple(mounts),
                on_output=report,
                on_connection=report_connection,
            )

    async def _open_mount(
        self, stack: AsyncExitStack, mount: RunMount, source_layers: tuple[str, ...] | None
    ) -> Mount:
        target = PurePosixPath("/", mount.target)
        if mount.kind == "cache":
            folder = await asyncio.to_thread(self._make_cache_folder, mount)
            if mount.options.get("sharing") in ("locked", "private"):
                await stack.enter_async_context(lock_step(self._locks_folder, folder.name))
            return Mount(folder, target, writable=not mount.is_set("ro", "readonly"))
        staged = await asyncio.to_thread(self._store.stage_layer)
        stack.push_async_callback(self._discard, staged)
        request = CopyRequest("/content", sources=(mount.source or "/",))
        step = None if source_layers is not None else self._select_mount(mount, request)
        await self._run_copy((), staged, request, step=step, source_layers=source_layers)
        return Mount(staged / "content", target, writable=mount.is_set("rw", "readwrite"))

    async def _discard(self, staged: Path) -> None:
        await run_shielded(asyncio.to_thread(self._store.discard_layer, staged))

    def _select_mount(self, mount: RunMount, request: CopyRequest) -> CopyStep:
        items = tuple(self._tree.select(mount.source or "."))
        return CopyStep(request, "", self._tree, items, (), unpacks=False)

    def _make_cache_folder(self, mount: RunMount) -> Path:
        """The folder of a cache mount. It stays, and all builds with the same id share it."""
        identity = self._store.identity
        name = hashlib.sha256((mount.options.get("id") or mount.target).encode()).hexdigest()[:24]
        folder = self._store.folder / identity.key / "cache" / name
        folder.parent.mkdir(mode=0o711, exist_ok=True)
        if not folder.exists():
            folder.mkdir(mode=0o755, exist_ok=True)
            if os.geteuid() == 0:
                os.chown(folder, identity.host_uid(0) or 0, identity.host_gid(0) or 0)
            if mount.options.keys() & {"mode", "uid", "gid"}:
                set_rights(folder, identity, mount.mode, mount.number("uid"), mount.number("gid"))
        return folder

    # -- layers ---------------------------------------------------------------------------------------

    async def _make_layer(
        self,
        stage: Stage,
        instruction: Instruction,
        result: StageResult,
        inputs: dict[str, Any],
        make: Callable[[Path], Awaitable[None]],
    ) -> StageResult:
        """The result with one more layer: from the store, or made now."""
        if len(result.layers) >= MAX_LAYERS:
            raise line_error(instruction.line, f"there are more than {MAX_LAYERS} layers", "join RUN and COPY lines")
        self._step += 1
        started = time.monotonic()
        self._report("started", instruction, instruction.text, stage)
        layer = _layer_id(result.layers, instruction.keyword, inputs)
        try:
            is_cached = await self._ensure_layer(layer, make)
        except (ImageError, SandboxError) as error:
            self._report("failed", instruction, "", stage, time.monotonic() - started)
            if isinstance(error, ImageError) and "line" in error.data:
                raise
            hint = error.hint or "paddock doctor"
            message = f"{instruction.text}: {error.message}"
            raise line_error(instruction.line, message, hint) from error
        kind = "cached" if is_cached else "done"
        self._report(kind, instruction, "", stage, time.monotonic() - started)
        return StageResult((*result.layers, layer), result.scope)

    async def _ensure_layer(self, layer: str, make: Callable[[Path], Awaitable[None]]) -> bool:
        """Whether the layer was there already."""
        if self._use_cache and self._store.has_layer(layer):
            return True
        async with lock_step(self._locks_folder, layer.removeprefix("sha256:")[:24]):
            if self._use_cache and self._store.has_layer(layer):
                return True
            staged = await asyncio.to_thread(self._store.stage_layer)
            try:
                await make(staged)
                await asyncio.to_thread(self._store.commit_layer, staged, layer)
            finally:
                await self._discard(staged)
        return False

    def _image_of(self, layers: tuple[str, ...]) -> Image:
        return Image("a build step", "", layers)

    def _report(
        self,
        kind: Any,
        instruction: Instruction,
        text: str,
        stage: Stage | None = None,
        seconds: float = 0.0,
        connection: ConnectionRecord | None = None,
    ) -> None:
        if self._on_progress is not None:
            name = stage.name if stage is not None else ""
            steps = max(self._steps, self._step)
            self._on_progress(BuildEvent(kind, self._step, steps, instruction.line, text, name, seconds, connection))


def _layer_id(layers: tuple[str, ...], keyword: str, inputs: dict[str, Any]) -> str:
    content = {"version": KEY_VERSION, "layers": layers, "keyword": keyword, "inputs": inputs}
    encoded = json.dumps(content, sort_keys=True).encode("utf-8", "surrogateescape")
    return f"sha256:{hashlib.sha256(encoded).hexdigest()}"
