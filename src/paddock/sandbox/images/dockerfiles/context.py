"""The files that COPY and ADD can take: a folder, less what `.dockerignore` leaves out. Links never lead outside."""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import re
import stat
import tarfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING

from paddock.errors import ImageError
from paddock.sandbox.images.dockerfiles.ignore import IgnoreRules, has_wildcards, parse_ignore_file, path_regex

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MAX_LINKS = 40
NO_RULES = IgnoreRules()
ITEM_NAME_HEADER = "PADDOCK.name"
UNPACK_HEADER = "PADDOCK.unpack"


@dataclass(frozen=True, slots=True)
class SourceItem:
    """One file or folder that a source names. A folder is copied with all that is in it."""

    path: str
    """Below the root, without a leading slash; links resolved."""
    name: str
    """What a file is called at the destination, if that is a folder."""
    is_folder: bool


@dataclass(frozen=True, slots=True)
class SourceTree:
    """A folder from which files are copied: a build context, or the root of a stage."""

    root: str
    rules: IgnoreRules = NO_RULES

    def select(self, source: str) -> list[SourceItem]:
        """What a source of COPY names. No match of a pattern is no error, as in Docker.

        Raises FileNotFoundError for a plain name that is not there.
        """
        pattern = posixpath.normpath("/" + source).lstrip("/")
        if not has_wildcards(pattern):
            return [self._item(pattern.replace("\\", ""))]
        return [self._item(path) for path in self._match(pattern)]

    def _match(self, pattern: str) -> list[str]:
        """All paths that match, sorted. Below a folder that matches nothing else does."""
        paths = [""]
        for part in pattern.split("/"):
            regex = re.compile(path_regex(part, double_star=False))
            candidates = []
            for path in paths:
                folder = self._resolve(path)
                if folder is None or not os.path.isdir(self._host(folder)):
                    continue
                names = sorted(os.listdir(self._host(folder)))
                candidates += [posixpath.join(folder, name) for name in names if regex.fullmatch(name)]
            paths = candidates
        return [path for path in paths if not self.rules.ignores(path)]

    def _item(self, path: str) -> SourceItem:
        resolved = self._resolve(path)
        if resolved is None or (resolved and self._is_left_out(resolved)):
            raise FileNotFoundError(path)
        return SourceItem(resolved, posixpath.basename(path), os.path.isdir(self._host(resolved)))

    def _is_left_out(self, path: str) -> bool:
        if not self.rules.ignores(path):
            return False
        return not (self.rules.has_exceptions and os.path.isdir(self._host(path)) and any(self.walk(path)))

    def _host(self, path: str) -> str:
        return os.path.join(self.root, path) if path else self.root

    def _resolve(self, path: str) -> str | None:
        """The path with all links resolved below the root; None if nothing is there."""
        waiting = [part for part in path.split("/") if part]
        done: list[str] = []
        links = 0
        while waiting:
            part = waiting.pop(0)
            if part in ("", "."):
                continue
            if part == "..":
                done = done[:-1]
                continue
            here = self._host("/".join([*done, part]))
            try:
                mode = os.lstat(here).st_mode
            except (FileNotFoundError, NotADirectoryError):
                return None
            if not stat.S_ISLNK(mode):
                done.append(part)
                continue
            links += 1
            if links > MAX_LINKS:
                return None
            target = os.readlink(here)
            done = [] if target.startswith("/") else done
            waiting = [*target.split("/"), *waiting]
        return "/".join(done)

    def walk(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        """Everything below a folder that is copied, without the folder itself: parents first, in a fixed order."""
        with os.scandir(self._host(path)) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            child = posixpath.join(path, name)
            status = os.lstat(self._host(child))
            is_folder = stat.S_ISDIR(status.st_mode)
            if not self.rules.ignores(child):
                yield child, status
                if is_folder:
                    yield from self.walk(child)
            elif is_folder and self.rules.has_exceptions:
                below = list(self.walk(child))
                if below:
                    yield child, status
                    yield from below

    def entries(self, item: SourceItem) -> Iterator[tuple[str, str, os.stat_result]]:
        """Path, path relative to the item (empty for itself), and status of all that an item copies."""
        yield item.path, "", os.lstat(self._host(item.path))
        if item.is_folder:
            for path, status in self.walk(item.path):
                yield path, posixpath.relpath(path, item.path or "."), status

    # -- content --------------------------------------------------------------------------------------

    def digest(self, items: Sequence[SourceItem]) -> str:
        """A hash of names, kinds, modes and contents. Times and owners are not part of it."""
        total = hashlib.sha256()
        for item in items:
            for path, relative, status in self.entries(item):
                kind = stat.S_IFMT(status.st_mode)
                mode = 0 if stat.S_ISLNK(status.st_mode) else stat.S_IMODE(status.st_mode)
                total.update(f"{item.name}\0{relative}\0{kind:o} {mode:o}\0".encode("utf-8", "surrogateescape"))
                total.update(self._content_hash(path, status))
        return total.hexdigest()

    def _content_hash(self, path: str, status: os.stat_result) -> bytes:
        if stat.S_ISLNK(status.st_mode):
            return hashlib.sha256(os.fsencode(os.readlink(self._host(path)))).digest()
        if not stat.S_ISREG(status.st_mode):
            return b""
        with open(self._host(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    def write_archive(
        self,
        items: Sequence[SourceItem],
        output: IO[bytes],
        *,
        keeps_owners: bool = False,
        unpacks: bool = False,
        inline_files: Sequence[tuple[str, bytes]] = (),
    ) -> None:
        """The items as a tar stream. Member names start with the number of the item; its first member has its name.

        With `unpacks`, a file that is a tar archive is marked: it is unpacked at the destination.
        """
        with tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for number, item in enumerate(items):
                headers = {ITEM_NAME_HEADER: item.name or "/"}
                if unpacks and not item.is_folder and is_archive(self._host(item.path)):
                    headers[UNPACK_HEADER] = "1"
                for path, relative, status in self.entries(item):
                    self._add(archive, path, f"{number}/{relative}".rstrip("/"), status, keeps_owners, headers)
                    headers = {}
            for number, (name, content) in enumerate(inline_files, len(items)):
                member = tarfile.TarInfo(str(number))
                member.mode, member.size, member.pax_headers = 0o644, len(content), {ITEM_NAME_HEADER: name}
                archive.addfile(member, io.BytesIO(content))

    def _add(
        self,
        archive: tarfile.TarFile,
        path: str,
        name: str,
        status: os.stat_result,
        keeps_owners: bool,
        headers: dict[str, str],
    ) -> None:
        member = tarfile.TarInfo(name)
        member.pax_headers = headers
        member.mode = stat.S_IMODE(status.st_mode)
        member.mtime = status.st_mtime
        if keeps_owners:
            member.uid, member.gid = status.st_uid, status.st_gid
        if stat.S_ISDIR(status.st_mode):
            member.type = tarfile.DIRTYPE
            archive.addfile(member)
        elif stat.S_ISLNK(status.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(self._host(path))
            archive.addfile(member)
        elif stat.S_ISREG(status.st_mode):
            descriptor = os.open(self._host(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                member.size = os.fstat(descriptor).st_size
                archive.addfile(member, file)
        else:
            raise ImageError(f"/{path} cannot be copied", hint="it is neither a file, a folder nor a link")


def is_archive(path: str) -> bool:
    """Whether a file is a tar archive, compressed by gzip, bzip2, xz or not."""
    try:
        return os.path.isfile(path) and not os.path.islink(path) and tarfile.is_tarfile(path)
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class BuildContext:
    """A folder with the files of a build. `dockerfile` is the name of the Dockerfile in it, if it has one."""

    folder: Path
    dockerfile: str = "Dockerfile"

    def tree(self) -> SourceTree:
        """Its files, less what `DOCKERFILE.dockerignore` or else `.dockerignore` leaves out."""
        for name in (f"{self.dockerfile}.dockerignore", ".dockerignore"):
            path = self.folder / name
            if path.is_file():
                text = path.read_text(encoding="utf-8", errors="replace")
                return SourceTree(str(self.folder), parse_ignore_file(text, name))
        return SourceTree(str(self.folder))


@contextmanager
def open_context(context: BuildContext | Path | Mapping[str, bytes]) -> Iterator[BuildContext]:
    """A context as a folder. Files from memory go to a temporary one, in which scripts (`#!`) are executable."""
    if isinstance(context, BuildContext):
        yield context
    elif isinstance(context, Path):
        if not context.is_dir():
            raise ImageError(f"the build context {context} is no folder", hint="give the folder with the files")
        yield BuildContext(context)
    else:
        with TemporaryDirectory(prefix="paddock-context-") as folder:
            for name, content in context.items():
                _write_file(Path(folder), name, content)
            yield BuildContext(Path(folder))


def _write_file(folder: Path, name: str, content: bytes) -> None:
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        raise ImageError(f"the build context has a file {name!r}", hint="use relative names without ..")
    path = folder.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755 if content.startswith(b"#!") else 0o644)
