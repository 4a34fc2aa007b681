"""Artifacts: the files that a task keeps from the agent's sandbox, and the collect commands that write some of them.

Each artifact is one archive, checked so that it can be unpacked anywhere: links that lead out of it are left out. A
separate verifier gets the artifacts at their original places. The store gets them as one archive.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from paddock.errors import SandboxError
from paddock.limits import MEBIBYTE
from paddock.rollouts.image_tests import reset_folders, script_command
from paddock.rollouts.sandboxes import describe_end
from paddock.sandbox.base import LOGS, TESTS, Command
from paddock.sandbox.guest.files import FILE_ITSELF
from paddock.tasks.settings import Artifact

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paddock.sandbox.base import Sandbox
    from paddock.tasks.settings import CollectCommand

ARTIFACTS = LOGS / "artifacts"
"""Always kept, whatever the task lists."""
LARGEST_ARTIFACTS = 512 * MEBIBYTE
"""For all artifacts of a rollout together: they are held in memory, and kept in the store."""
MOST_MEMBERS = 100_000
LISTED_LINKS = 3
ROOT = PurePosixPath("/")


@dataclass(frozen=True, slots=True)
class CollectedArtifact:
    """One artifact, packed."""

    source: PurePosixPath
    """Where it was in the sandbox."""
    path: str
    """Where it is in the archive of all artifacts."""
    archive: bytes
    """As `Sandbox.pack` returns it."""

    def members(self) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
        with tarfile.open(fileobj=io.BytesIO(self.archive)) as packed:
            for member in packed:
                yield member, self.archive[member.offset_data : member.offset_data + member.size]

    @property
    def is_file(self) -> bool:
        return any(member.name == FILE_ITSELF for member, _ in islice(self.members(), 1))


@dataclass(frozen=True, slots=True)
class Artifacts:
    """What was collected, and what could not be."""

    items: tuple[CollectedArtifact, ...] = ()
    problems: tuple[str, ...] = ()
    too_large: str | None = None
    """The artifact that is beyond the limit, if one is. A score without it would mean nothing."""

    def files(self) -> list[dict[str, str | int]]:
        """`path` in the archive, `size` and `source` of each file. Blocks."""
        return [
            {"path": join(artifact.path, member.name), "size": member.size, "source": str(artifact.source)}
            for artifact in self.items
            for member, _ in artifact.members()
            if member.isreg()
        ]

    def archive(self) -> bytes:
        """All artifacts as one tar, each below its own path. Blocks."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as packed:
            for artifact in self.items:
                for member, content in artifact.members():
                    member.name = join(artifact.path, member.name)
                    packed.addfile(member, io.BytesIO(content))
        return buffer.getvalue()

    def withheld(self) -> list[str]:
        """Why a separate verifier does not get some artifacts: its tests are its own."""
        return [
            f"the verifier does not get the artifact {artifact.source}, which would replace its tests"
            for artifact in self.items
            if hides_tests(artifact.source)
        ]

    async def place(self, sandbox: Sandbox) -> None:
        """Put the artifacts where they were. A folder replaces what is there. Raises SandboxError."""
        placed = sorted((each for each in self.items if not hides_tests(each.source)), key=lambda each: each.source)
        folders = [str(artifact.source) for artifact in placed if not artifact.is_file]
        if folders:
            await reset_folders(sandbox, *folders)
        for artifact in placed:
            if artifact.is_file:
                await sandbox.unpack(artifact.source.parent, renamed(artifact))
            else:
                await sandbox.unpack(artifact.source, artifact.archive)


async def run_collect_commands(sandbox: Sandbox, commands: Iterable[CollectCommand], *, user: str) -> list[str]:
    """Run the collect commands of a task, and return why some failed. A failure stops nothing, as in Harbor."""
    problems = []
    for collect in commands:
        argv = script_command(collect.command)
        command = Command(argv, cwd=sandbox.workdir, user=collect.user or user)
        try:
            done = await sandbox.exec(command, timeout=collect.timeout)
        except SandboxError as error:
            problems.append(f"the collect command {collect.command!r} could not be run: {error.message}")
        else:
            if done.exit_code != 0:
                problems.append(f"the collect command {collect.command!r} failed: {describe_end(done)}")
    return problems


async def collect_artifacts(sandbox: Sandbox, artifacts: Iterable[Artifact]) -> Artifacts:
    """Read `/logs/artifacts` and each listed source. Also works when no process is left inside.

    One that is missing, cannot be read or has the place of another is left out, with a problem.
    """
    collector = Collector(sandbox)
    for artifact in with_log_folder(artifacts):
        await collector.collect(artifact)
    return Artifacts(tuple(collector.items), tuple(collector.problems), collector.too_large)


class Collector:
    """Reads artifacts one after the other."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.items: list[CollectedArtifact] = []
        self.problems: list[str] = []
        self.too_large: str | None = None
        self._sandbox = sandbox
        self._bytes_left, self._members_left = LARGEST_ARTIFACTS, MOST_MEMBERS

    async def collect(self, artifact: Artifact) -> None:
        source = self._sandbox.workdir / artifact.source
        path = str(PurePosixPath(artifact.destination or source.relative_to(ROOT)))
        other = next((each for each in self.items if overlap(each.path, path)), None)
        if other is not None:
            if not covers(other, source, path):
                self.problems.append(f"the artifact {source} is not kept: {other.source} has its place {path}")
            return
        try:
            packed = await self._sandbox.pack(source, limit=self._bytes_left, exclude=artifact.exclude)
            archive = await asyncio.to_thread(check_archive, packed, self._members_left)
        except FileNotFoundError:
            if source != ARTIFACTS:
                self.problems.append(f"the artifact {source} does not exist")
            return
        except (SandboxError, OSError) as error:
            reason = str(error)
            if isinstance(error, SandboxError) and "limit" in error.data:
                size = f"{LARGEST_ARTIFACTS // MEBIBYTE} MiB or {MOST_MEMBERS:,} files"
                reason = self.too_large = f"with {source}, the artifacts have more than {size} together"
            self.problems.append(f"the artifact {source} is not kept: {reason}")
            return
        self._bytes_left -= len(archive.content)
        self._members_left -= archive.members
        if archive.outer_links:
            more = " …" if len(archive.outer_links) > LISTED_LINKS else ""
            names = ", ".join(archive.outer_links[:LISTED_LINKS])
            self.problems.append(f"links that lead out of the artifact {source} are left out: {names}{more}")
        self.items.append(CollectedArtifact(source, path, archive.content))


# -- parts ----------------------------------------------------------------------------------------------


def with_log_folder(artifacts: Iterable[Artifact]) -> Sequence[Artifact]:
    """`/logs/artifacts` comes first, unless the task lists it itself."""
    listed = list(artifacts)
    if any(PurePosixPath(artifact.source) == ARTIFACTS for artifact in listed):
        return listed
    return [Artifact(str(ARTIFACTS)), *listed]


def overlap(first: str, second: str) -> bool:
    return PurePosixPath(first).is_relative_to(second) or PurePosixPath(second).is_relative_to(first)


def covers(other: CollectedArtifact, source: PurePosixPath, path: str) -> bool:
    """Whether `source` was kept with another artifact, at the same place."""
    return source.is_relative_to(other.source) and join(other.path, str(source.relative_to(other.source))) == path


def hides_tests(source: PurePosixPath) -> bool:
    return source == ROOT or source.is_relative_to(TESTS)


def join(folder: str, name: str) -> str:
    return str(PurePosixPath(folder) / name)


def renamed(artifact: CollectedArtifact) -> bytes:
    """The archive of a file, under its name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as packed:
        for member, content in artifact.members():
            member.name = artifact.source.name
            packed.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class CheckedArchive:
    """An archive from the sandbox that is safe to unpack."""

    content: bytes
    """Without the links that lead out of it."""
    members: int
    outer_links: tuple[str, ...] = ()
    """The names of those links."""


def check_archive(content: bytes, limit: int) -> CheckedArchive:
    """Raises SandboxError for an archive with more members than `limit`. Blocks."""
    whole = CollectedArtifact(ROOT, "", content)
    outer: list[str] = []
    count = 0
    for member, _ in whole.members():
        count += 1
        if count > limit:
            raise SandboxError(f"the archive has more than {limit} members", limit=limit)
        if member.issym() and leads_out(member):
            outer.append(member.name)
    if not outer:
        return CheckedArchive(content, count)
    left_out = frozenset(outer)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as packed:
        for member, data in whole.members():
            if member.name not in left_out:
                packed.addfile(member, io.BytesIO(data))
    return CheckedArchive(buffer.getvalue(), count, tuple(outer))


def leads_out(link: tarfile.TarInfo) -> bool:
    """A target may begin with `..`, but not have one later: it could come after another link."""
    target = PurePosixPath(link.linkname)
    upwards = 0
    while upwards < len(target.parts) and target.parts[upwards] == "..":
        upwards += 1
    depth = len(PurePosixPath(link.name).parts) - 1
    return target.is_absolute() or upwards > depth or ".." in target.parts[upwards:]
