"""Sandboxes whose root is an image, for backends that claim them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from paddock.sandbox.base import Command
from paddock.testing.checks import Skipped, require
from paddock.testing.sandbox.commands import it_runs_a_command
from paddock.testing.sandbox.subject import SPEC, SandboxSubject, check, refuses, run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paddock.sandbox.base import Sandbox


@asynccontextmanager
async def opened_image(subject: SandboxSubject) -> AsyncIterator[Sandbox]:
    if not subject.shared.supports_images:
        raise Skipped("this backend opens no images")
    if subject.image is None:
        raise Skipped("there is no image to open")
    async with subject.another(replace(SPEC, image=subject.image, readonly_tests={})) as sandbox:
        yield sandbox


@check("refuse an image if `supports_images` is not set")
async def images_are_opened_or_refused(subject: SandboxSubject) -> None:
    if subject.shared.supports_images or subject.image is None:
        return
    await refuses(subject.open(replace(SPEC, image=subject.image)), "the image was left out silently")


@check("make the image the root; commands are root, in its work folder", needs=[it_runs_a_command])
async def commands_are_root_in_an_image(subject: SandboxSubject) -> None:
    async with opened_image(subject) as sandbox:
        done = await run(
            sandbox, "id -u; pwd; echo $FROM_SPEC; touch /made; cat /etc/hosts > /dev/null; echo written"
        )
        lines = done.stdout.decode().splitlines()
        require(lines == ["0", str(sandbox.workdir), "yes", "written"], f"got {done}")
        require(await sandbox.read("/made") == b"", "a file of the root cannot be read")
        require(sandbox.runtime_python is not None, "runtime_python is not set")
        done = await sandbox.exec(Command([str(sandbox.runtime_python), "-c", "print(6 * 7)"]), timeout=20)
        require(done.stdout == b"42\n", f"its Python does not run: {done}")


@check("never write to the image itself", needs=[commands_are_root_in_an_image])
async def the_image_stays_as_it_is(subject: SandboxSubject) -> None:
    async with opened_image(subject) as sandbox:
        done = await run(sandbox, "[ -e /made ] || echo clean")
    require(done.stdout == b"clean\n", "a file of an earlier sandbox is in the image")


@check("end processes and go on, unless `supports_layers` is set", needs=[commands_are_root_in_an_image])
async def processes_of_an_image_can_be_ended(subject: SandboxSubject) -> None:
    async with opened_image(subject) as sandbox:
        if sandbox.supports_layers:
            await refuses(sandbox.end_processes(), "a backend with layers needs no end_processes")
            return
        await run(sandbox, "sleep 1000 > /dev/null 2>&1 & echo 1 > /kept")
        await sandbox.end_processes()
        require(list(await sandbox.list_processes()) == [], "a process is left")
        require((await run(sandbox, "cat /kept")).stdout == b"1\n", "the files are gone")
