"""Files of a git repository at one commit, without its history, and only those below the chosen paths.

Runs the `git` program. Hooks and filters of the user or the repository are not run, and submodules are not fetched:
their paths are listed in `Checkout.submodules`. LFS pointers stay pointers; `tasks.requirements` reports them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from paddock.errors import TaskError
from paddock.tasks.datasets.cache import DatasetCache, cache_key
from paddock.tasks.datasets.source import GitSource, without_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
SHORT_COMMIT = re.compile(r"[0-9a-f]{7,64}")
FETCH_SECONDS = 1800.0
RESOLVE_SECONDS = 120.0
# Variables with which git would work in another repository, and those that make it ask.
ENVIRONMENT = (
    *("env", "-u", "GIT_DIR", "-u", "GIT_WORK_TREE", "-u", "GIT_INDEX_FILE", "-u", "GIT_OBJECT_DIRECTORY"),
    *("LC_ALL=C", "GIT_TERMINAL_PROMPT=0", "GIT_LITERAL_PATHSPECS=1", "GIT_LFS_SKIP_SMUDGE=1"),
)
SETTINGS = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.symlinks": "true",
    "core.autocrlf": "false",
    "filter.lfs.smudge": "",
    "filter.lfs.process": "",
    "filter.lfs.required": "false",
    "submodule.recurse": "false",
    "fetch.recurseSubmodules": "false",
    "protocol.ext.allow": "never",
    "protocol.file.allow": "always",
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
    "gc.auto": "0",
    "advice.detachedHead": "false",
}
ALL_REFS = ("+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")
TREE = "tree"
SUBMODULES = "submodules.json"
SHOWN_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class Checkout:
    """Files at one commit."""

    folder: Path
    commit: str
    submodules: tuple[str, ...] = ()
    """Paths at which the repository has a submodule. They are empty here."""

    def path(self, name: str) -> Path:
        """A folder or file of the repository. Raises TaskError if it is missing or leads out of it."""
        place = self.folder / name
        if not place.exists():
            raise TaskError(f"commit {self.commit[:12]} has no {name!r}", hint="name a folder or file that it has")
        if not place.resolve().is_relative_to(self.folder.resolve()):
            raise TaskError(f"{name!r} is a link out of the repository", hint="name the folder itself")
        return place

    def missing_in(self, folder: Path) -> list[str]:
        """The submodules below a folder of the checkout, by their path in that folder."""
        places = [self.folder / path for path in self.submodules]
        return [str(place.relative_to(folder)) for place in places if place.is_relative_to(folder)]


def resolve_commit(cache: DatasetCache, source: GitSource, *, refresh: bool = False) -> str:
    """The commit of the revision: the one that was fetched earlier, or with `refresh` that of the repository now.

    Raises TaskError.
    """
    if COMMIT.fullmatch(source.revision):
        return source.revision
    key = f"git/revisions/{cache_key(source.url, source.revision)}.json"
    return str(cache.value(key, partial(_ask_remote, source), refresh=refresh))


def check_out(
    cache: DatasetCache, url: str, commit: str, paths: Sequence[str], log: Callable[[str], None]
) -> Checkout:
    """The files below `paths` at a commit, from the cache or fetched; no paths: all files. Raises TaskError."""
    chosen = sorted(set(paths))
    key = f"git/{cache_key(url, commit, *chosen)}"

    def make(folder: Path) -> None:
        log(f"fetching {without_credentials(url)} at {commit[:12]}")
        _Fetch(url, commit, folder).run(chosen)

    folder = cache.folder(key, make)
    submodules = json.loads((folder / SUBMODULES).read_bytes())
    return Checkout(folder / TREE, commit, tuple(submodules))


def _ask_remote(source: GitSource) -> str:
    revision = source.revision or "HEAD"
    patterns = [revision, f"refs/tags/{revision}^{{}}"]
    output = _run_git(["ls-remote", "--", source.url, *patterns], source.url, RESOLVE_SECONDS)
    refs = {name: commit for commit, _, name in (line.partition("\t") for line in output.splitlines())}
    # A tag that is an object of its own points to the commit in its `^{}` line.
    for name in (f"refs/tags/{revision}^{{}}", f"refs/tags/{revision}", f"refs/heads/{revision}", revision):
        if name in refs:
            return refs[name]
    if SHORT_COMMIT.fullmatch(revision):
        raise TaskError(f"{revision} is not a whole commit id", hint="write all 40 digits, or a branch or tag")
    raise TaskError(f"{source.public_url} has no branch or tag {revision!r}", hint="git ls-remote lists those it has")


@dataclass(frozen=True, slots=True)
class _Fetch:
    """Fetches one commit into `folder`: `tree` gets its files, and nothing of the repository stays."""

    url: str
    commit: str
    folder: Path

    def run(self, paths: Sequence[str]) -> None:
        self._fetch_objects()
        submodules = self._list_submodules(paths)
        (self.folder / TREE).mkdir()
        self._git(f"--work-tree={self.folder / TREE}", "checkout", "--quiet", self.commit, "--", *(paths or ["."]))
        shutil.rmtree(self._repository)
        (self.folder / SUBMODULES).write_text(json.dumps(submodules))

    def _fetch_objects(self) -> None:
        try:
            self._fetch("--no-tags", "--depth=1", "--filter=blob:none", "origin", self.commit)
        except TaskError:
            # For servers that give no single commits, and for files that are served without git. The repository is
            # made anew: git would ask a partial one's server for each object that is missing.
            shutil.rmtree(self._repository)
            self._fetch("origin", *ALL_REFS)

    def _fetch(self, *arguments: str) -> None:
        self._git("init", "--quiet", "--bare", "--template=")
        self._git("remote", "add", "origin", self.url)
        self._git("fetch", "--quiet", *arguments)
        self._git("cat-file", "-e", f"{self.commit}^{{commit}}")

    def _list_submodules(self, paths: Sequence[str]) -> list[str]:
        lines = self._git("ls-tree", "-r", "-z", self.commit, "--", *paths).split("\0")
        entries = [line.partition("\t") for line in lines if line]
        missing = [path for path in paths if not any(_is_below(name, path) for _, _, name in entries)]
        if missing:
            raise TaskError(
                f"{without_credentials(self.url)} has no {missing[0]!r} at {self.commit[:12]}",
                hint="name a folder or file that it has",
            )
        return [name for mode, _, name in entries if mode.startswith("160000 ")]

    @property
    def _repository(self) -> Path:
        return self.folder / "repository"

    def _git(self, *arguments: str) -> str:
        # The repository is named, so that git never looks for another one around it.
        place = self.folder / TREE
        command = [f"--git-dir={self._repository}", *arguments]
        return _run_git(command, self.url, FETCH_SECONDS, place if place.exists() else self.folder)


def _is_below(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}/")


def _run_git(arguments: Sequence[str], url: str, seconds: float, folder: Path | None = None) -> str:
    settings = [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
    public_address = without_credentials(url)
    try:
        done = subprocess.run(
            [*ENVIRONMENT, "git", *settings, *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise TaskError(
            f"{public_address} did not answer within {seconds:g} s", hint="try again; nothing was kept"
        ) from None
    except OSError as error:
        raise TaskError(f"git cannot be run: {error.strerror}", hint="install git") from error
    if done.returncode == 0:
        return done.stdout.decode(errors="replace")
    output = done.stderr.decode(errors="replace").replace(url, public_address).strip()
    if done.returncode == 127:
        raise TaskError("there is no git program", hint="install git")
    raise TaskError(
        f"{public_address} cannot be read with git: {output[-SHOWN_CHARACTERS:]}",
        hint="check the address, the revision and your access with: git ls-remote",
    )
