"""Notes of a task, and instructions that look like commands."""

import asyncio
from pathlib import PurePosixPath

import pytest

from paddock.agents.base import copy_notes, escape_slash_command
from paddock.errors import SandboxError


class Folder:
    """As much of a sandbox as notes need."""

    workdir = PurePosixPath("/w")

    def __init__(self, **files: bytes) -> None:
        self.files = {f"/w/{name}": text for name, text in files.items()}

    async def read(self, path: PurePosixPath, *, limit: int) -> bytes:
        data = self.files.get(str(path))
        if data is None:
            raise FileNotFoundError(path)
        if data == b"link" or len(data) > limit:
            raise SandboxError("not a file, or too large")
        return data

    async def write(self, path: PurePosixPath, data: bytes) -> None:
        self.files[str(path)] = data


@pytest.mark.parametrize(
    ("files", "copied"),
    [
        ({}, None),
        ({"B": b"second"}, b"second"),
        ({"A": b"first", "B": b"second"}, b"first"),
        ({"A": b"link", "B": b"second"}, b"second"),
        ({"A": b"x" * 100_000}, None),
    ],
)
def test_the_first_readable_notes_are_copied(files: dict[str, bytes], copied: bytes | None) -> None:
    folder = Folder(**files)
    asyncio.run(copy_notes(folder, ("A", "B"), PurePosixPath("/to")))  # type: ignore[arg-type]
    assert folder.files.get("/to") == copied


@pytest.mark.parametrize(
    ("instruction", "stdin"), [("Do it.", b"Do it."), ("/exit", b" /exit"), ("a/b", b"a/b"), ("", b"")]
)
def test_an_instruction_is_never_a_slash_command(instruction: str, stdin: bytes) -> None:
    assert escape_slash_command(instruction) == stdin


def test_the_escape_can_be_a_line_break() -> None:
    assert escape_slash_command("/clear", "\n") == b"\n/clear"
    assert escape_slash_command("a\n/b", "\n") == b"a\n/b"
