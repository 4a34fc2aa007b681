"""What an owner does with the files of a local sandbox, as a value that another process can carry out too.

An ordinary user cannot open the files of other users of an image: on the host these ids are not its own. A process
in a user namespace with the same ids can (`perform_in_namespace`). It takes longer, so that it comes second.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from paddock.errors import SandboxError
from paddock.sandbox.guest import files
from paddock.sandbox.guest_sandbox import sealed_file
from paddock.sandbox.user_namespace import Identity, call_in_namespace

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMESPACE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class FileAction:
    """One of the file methods of a sandbox. `write` and `unpack` take bytes, the others return some."""

    kind: Literal["read", "write", "list", "pack", "unpack"]
    parts: Sequence[str]
    limit: int = 0
    exclude: Sequence[str] = ()
    """Patterns of what `pack` leaves out."""
    mode: int = 0
    top: str | None = None
    """The path inside of the open folder, for `files.unpack_folder`."""
    is_root: bool = False
    """Whether the open folder is the root of an image: links on the way are followed, within the root."""

    def perform(self, root: int, data: bytes) -> bytes:
        """Do it below the folder with the descriptor `root`. Entries of a folder come back as JSON."""
        is_file = self.kind in ("read", "write")
        parts = files.resolve_in_image(root, self.parts, is_file=is_file) if self.is_root else self.parts
        if self.kind == "read":
            return files.read_file(root, parts, self.limit)
        if self.kind == "pack":
            return files.pack_folder(root, parts, self.limit, self.exclude)
        if self.kind == "list":
            entries = files.list_folder(root, parts, self.limit)
            return json.dumps([[entry.path, entry.kind, entry.size, entry.mode] for entry in entries]).encode()
        if self.kind == "write":
            files.write_file(root, parts, data, self.mode)
        else:
            files.unpack_folder(root, parts, data, self.top)
        return b""


def is_refused(error: SandboxError) -> bool:
    """Whether an action failed because a file belongs to another user."""
    return isinstance(error.__cause__, PermissionError)


def perform_in_namespace(action: FileAction, root: int, data: bytes, identity: Identity) -> bytes:
    """As `FileAction.perform`, with the rights of the root of a sandbox that has this identity. Blocks."""
    content = sealed_file("content", data)
    try:
        output = call_in_namespace(
            f"{__name__}:serve",
            [str(root), json.dumps(asdict(action))],
            identity,
            pass_fds=[root],
            stdin=content,
            timeout=NAMESPACE_SECONDS,
        )
    finally:
        os.close(content)
    line, _, result = output.partition(b"\n")
    failure: dict[str, Any] | None = json.loads(line)
    if failure is None:
        return result
    if failure["number"] is not None:
        raise FileNotFoundError(failure["number"], failure["message"], failure["hint"])
    raise SandboxError(failure["message"], hint=failure["hint"], **failure["data"])


def serve(root: str, action: str) -> None:
    """In the namespace: perform the action with standard input. Write its failure as JSON, then its result."""
    failure: dict[str, Any] | None = None
    result = b""
    try:
        result = FileAction(**json.loads(action)).perform(int(root), sys.stdin.buffer.read())
    except FileNotFoundError as error:
        failure = {"number": error.errno, "message": error.strerror, "hint": error.filename}
    except SandboxError as error:
        failure = {"number": None, "message": error.message, "hint": error.hint, "data": error.data}
    sys.stdout.buffer.write(json.dumps(failure).encode() + b"\n" + result)
    sys.stdout.buffer.flush()
