"""What a task says to its agent: its instruction, and files of its own such as `AGENTS.md`.

Some programs read these files only in a folder that they trust, and then believe the settings there as well:
other models, programs to start. They are made to trust nothing, and get the words on another way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddock.errors import SandboxError

if TYPE_CHECKING:
    from pathlib import PurePosixPath

    from paddock.rollouts.sandbox.base import Sandbox

LARGEST_NOTES = 64 * 1024


async def carry_notes(sandbox: Sandbox, names: tuple[str, ...], target: PurePosixPath) -> None:
    """Copy the first of these files that the work folder has to `target`."""
    words = await read_notes(sandbox, names)
    if words:
        await sandbox.write(target, words)


async def read_notes(sandbox: Sandbox, names: tuple[str, ...]) -> bytes:
    """The first of these files that the work folder has; nothing if it has none."""
    for name in names:
        try:
            return await sandbox.read(sandbox.workdir / name, limit=LARGEST_NOTES)
        except (FileNotFoundError, SandboxError):
            continue
    return b""


def plain_words(instruction: str) -> bytes:
    """An instruction for programs that take `/word` at its beginning for a command of their own."""
    return (f" {instruction}" if instruction.startswith("/") else instruction).encode()
