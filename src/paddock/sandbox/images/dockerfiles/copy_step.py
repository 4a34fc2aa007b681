"""COPY and ADD: what they take, where they put it, and what their layer depends on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from paddock.sandbox.images.dockerfiles.dockerfile import check_is_local, copy_words
from paddock.sandbox.images.dockerfiles.expansion import Expander
from paddock.sandbox.images.dockerfiles.layer_copy import CopyRequest
from paddock.sandbox.images.dockerfiles.scope import BuildScope, resolve_path
from paddock.sandbox.images.dockerfiles.syntax import Instruction, line_error

if TYPE_CHECKING:
    from paddock.sandbox.images.dockerfiles.context import SourceItem, SourceTree

OUTSIDE_CONTEXT = "copy-outside-context"
OCTAL_MODE = re.compile(r"0?[0-7]{3,4}")


@dataclass(frozen=True, slots=True)
class CopyStep:
    """A COPY or ADD with everything expanded."""

    request: CopyRequest
    source: str
    """`--from`. Empty: the build context."""
    tree: SourceTree
    items: tuple[SourceItem, ...]
    inline_files: tuple[tuple[str, bytes], ...]
    unpacks: bool

    def key_inputs(self) -> dict[str, Any]:
        """What the layer depends on, besides the layers of `--from`."""
        request = self.request
        return {
            "destination": request.destination,
            "owner": request.owner,
            "mode": request.mode,
            "sources": request.sources if self.source else (),
            "files": self.tree.digest(self.items),
            "inline": [(name, content.decode("utf-8", "surrogateescape")) for name, content in self.inline_files],
            "unpacks": self.unpacks,
        }

    def write_files(self, output: IO[bytes]) -> None:
        self.tree.write_archive(self.items, output, unpacks=self.unpacks, inline_files=self.inline_files)


def read_copy(instruction: Instruction, scope: BuildScope, tree: SourceTree) -> CopyStep:
    """Raises ImageError, with the line, for a source that is not in the build context."""
    line = instruction.line
    flags = {name: scope.expand(value or "", line) for name, value in instruction.flags}
    *sources, destination = copy_words(instruction, scope.escape)
    heredocs = {_heredoc_word(word): word for word in sources if word.lstrip("0123456789").startswith("<<")}
    inline_files = []
    for heredoc in instruction.heredocs:
        text = heredoc.text
        if heredoc.expands:
            text = Expander(scope.variables, scope.escape, line).expand_heredoc(text)
        inline_files.append((heredoc.name, text.encode()))
        sources = [word for word in sources if word != heredocs.get(heredoc.name)]
    names = tuple(scope.expand(word, line) for word in sources)
    place = _destination(scope, scope.expand(destination, line))
    source = flags.get("from", "")
    items = () if source else _select(instruction, names, tree)
    count = len(items) if not source else len(names)
    if len(names) + len(inline_files) > 1 or count > 1:
        _check_folder(place, instruction)
    request = CopyRequest(
        place, owner=flags.get("chown", ""), mode=_read_mode(flags.get("chmod"), line), sources=names
    )
    unpacks = instruction.keyword == "ADD"
    return CopyStep(request, source, tree, items, tuple(inline_files), unpacks)


def _heredoc_word(word: str) -> str:
    return re.sub(r"^\d*<<-?", "", word).strip("'\"")


def _destination(scope: BuildScope, text: str) -> str:
    """The absolute destination. It keeps the slash that says that it is a folder."""
    path = str(resolve_path(PurePosixPath(scope.config.workdir), text))
    is_folder = text.endswith("/") or text.rpartition("/")[2] in (".", "..", "")
    return path if not is_folder or path == "/" else f"{path}/"


def _check_folder(place: str, instruction: Instruction) -> None:
    if not place.endswith("/"):
        raise line_error(
            instruction.line,
            f"{instruction.keyword} has several sources, and the destination {place} is no folder",
            "put a slash at its end",
        )


def _read_mode(text: str | None, line: int) -> int | None:
    if text is None:
        return None
    if not OCTAL_MODE.fullmatch(text):
        raise line_error(line, f"--chmod is {text!r}", "give an octal number such as 755")
    return int(text, 8)


def _select(instruction: Instruction, names: tuple[str, ...], tree: SourceTree) -> tuple[SourceItem, ...]:
    items: list[SourceItem] = []
    for name in names:
        _check_source(instruction, name)
        try:
            items += tree.select(name)
        except FileNotFoundError:
            hint = "check the name and .dockerignore; only files of the build context can be copied"
            message = f"{instruction.keyword} {name}: not in the build context"
            raise line_error(instruction.line, message, hint, fault=OUTSIDE_CONTEXT) from None
    return tuple(items)


def _check_source(instruction: Instruction, name: str) -> None:
    check_is_local(name, instruction.keyword, instruction.line)
    depth = 0
    for part in name.lstrip("/").split("/"):
        depth += {"..": -1, ".": 0, "": 0}.get(part, 1)
        if depth < 0:
            raise line_error(
                instruction.line,
                f"{instruction.keyword} {name}: it lies outside of the build context",
                "move the file into the folder of the Dockerfile",
                fault=OUTSIDE_CONTEXT,
            )
