"""A Dockerfile as stages. What is not supported is refused here, with its line, before anything is built."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from paddock.sandbox.images.dockerfiles.syntax import Instruction, line_error, parse_lines, split_quoted, unsupported

FLAGS: dict[str, frozenset[str]] = {
    "ADD": frozenset({"chown", "chmod"}),
    "ARG": frozenset(),
    "CMD": frozenset(),
    "COPY": frozenset({"from", "chown", "chmod"}),
    "ENTRYPOINT": frozenset(),
    "ENV": frozenset(),
    "EXPOSE": frozenset(),
    "FROM": frozenset({"platform"}),
    "HEALTHCHECK": frozenset({"interval", "timeout", "start-period", "start-interval", "retries"}),
    "LABEL": frozenset(),
    "RUN": frozenset({"mount"}),
    "SHELL": frozenset(),
    "USER": frozenset(),
    "VOLUME": frozenset(),
    "WORKDIR": frozenset(),
}
"""The instructions that are supported, each with its flags."""
REPEATABLE_FLAGS = ("mount",)
HINTS = {
    "MAINTAINER": "use LABEL org.opencontainers.image.authors=…",
    "ONBUILD": "write the instruction into the Dockerfile that uses the image",
    "STOPSIGNAL": "remove it: sandboxes end with SIGKILL",
    "--link": "remove it: it only changes caching",
    "--network": "choose the network of the whole build: --network",
    "--checksum": "download in a RUN step and check there: sha256sum -c",
}
MOUNT_OPTIONS = {
    "bind": frozenset(
        {"type", "source", "src", "target", "dst", "destination", "from", "rw", "readwrite", "ro", "readonly"}
    ),
    "cache": frozenset(
        {"type", "id", "target", "dst", "destination", "ro", "readonly", "sharing", "from", "source", "src"}
        | {"mode", "uid", "gid"}
    ),
}
MOUNT_NUMBERS = {"mode": re.compile("[0-7]{1,5}"), "uid": re.compile("[0-9]{1,9}"), "gid": re.compile("[0-9]{1,9}")}
STAGE_NAME = re.compile(r"[a-z][a-z0-9-_.]*")
CACHE_SHARING = ("shared", "private", "locked")
SCRATCH = "scratch"
REMOTE = re.compile(r"(https?|ftp|git|ssh)://|git@")
"""The beginning of a source that is not in the build context."""


@dataclass(frozen=True, slots=True)
class RunMount:
    """`RUN --mount`: a folder that is there for one step only."""

    kind: str
    options: dict[str, str] = field(hash=False)

    @property
    def target(self) -> str:
        return self.first("target", "dst", "destination")

    @property
    def source(self) -> str:
        return self.first("source", "src")

    @property
    def mode(self) -> int:
        """Of a new cache folder."""
        return int(self.options.get("mode") or "755", 8)

    def number(self, name: str) -> int:
        return int(self.options.get(name) or 0)

    def first(self, *names: str) -> str:
        return next((self.options[name] for name in names if name in self.options), "")

    def is_set(self, *names: str) -> bool:
        return any(self.options.get(name) in ("", "true", "1") for name in names)


@dataclass(frozen=True, slots=True)
class Stage:
    """From one FROM to the next."""

    position: int
    name: str
    """In lower case; empty without AS."""
    base: str
    """The name of an image or of an earlier stage, or `scratch`. Not expanded."""
    platform: str
    line: int
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """The stages of a Dockerfile, and the ARGs before the first one."""

    stages: tuple[Stage, ...]
    global_args: tuple[Instruction, ...]
    escape: str

    def find_stage(self, name: str, before: int | None = None) -> Stage | None:
        """The stage of this name or number, among those before a position."""
        stages = self.stages if before is None else self.stages[:before]
        if name.isdigit():
            return stages[int(name)] if int(name) < len(stages) else None
        return next((stage for stage in reversed(stages) if stage.name and stage.name == name.lower()), None)


def parse_dockerfile(text: str) -> Dockerfile:
    """Raises ImageError, with the line, for whatever is wrong or not supported."""
    parsed = parse_lines(text)
    global_args: list[Instruction] = []
    stages: list[Stage] = []
    body: list[Instruction] = []
    for instruction in parsed.instructions:
        _check(instruction, parsed.escape)
        if instruction.keyword == "FROM":
            if stages:
                stages[-1] = _with_body(stages[-1], body)
            body = []
            stages.append(_read_from(instruction, len(stages), stages))
        elif stages:
            body.append(instruction)
        elif instruction.keyword == "ARG":
            global_args.append(instruction)
        else:
            raise line_error(
                instruction.line, f"{instruction.keyword} comes before FROM", "only ARG can come before FROM"
            )
    if not stages:
        raise line_error(parsed.instructions[-1].line, "there is no FROM", "a Dockerfile needs FROM IMAGE")
    stages[-1] = _with_body(stages[-1], body)
    return Dockerfile(tuple(stages), tuple(global_args), parsed.escape)


def _with_body(stage: Stage, body: list[Instruction]) -> Stage:
    return Stage(stage.position, stage.name, stage.base, stage.platform, stage.line, tuple(body))


def _read_from(instruction: Instruction, position: int, stages: list[Stage]) -> Stage:
    words = instruction.rest.split()
    name = ""
    if len(words) == 3 and words[1].upper() == "AS":
        name = words[2].lower()
        if not STAGE_NAME.fullmatch(name):
            raise line_error(instruction.line, f"{words[2]!r} is no name of a stage", "use a-z, 0-9, - _ and .")
        if any(stage.name == name for stage in stages):
            raise line_error(instruction.line, f"there are two stages {name!r}", "rename one of them")
    elif len(words) != 1:
        raise line_error(
            instruction.line, "FROM has the wrong number of words", "write FROM IMAGE, or FROM IMAGE AS NAME"
        )
    platform = dict(instruction.flags).get("platform") or ""
    return Stage(position, name, words[0], platform, instruction.line, ())


def _check(instruction: Instruction, escape: str) -> None:
    keyword, line = instruction.keyword, instruction.line
    if keyword not in FLAGS:
        hint = HINTS.get(keyword, f"these are supported: {', '.join(sorted(FLAGS))}")
        raise unsupported(line, f"{keyword} is not supported", hint)
    seen: set[str] = set()
    for name, value in instruction.flags:
        if name not in FLAGS[keyword]:
            flags = ", ".join(f"--{flag}" for flag in sorted(FLAGS[keyword])) or "none"
            hint = HINTS.get(f"--{name}", f"flags of {keyword}: {flags}")
            raise unsupported(line, f"{keyword} --{name} is not supported", hint)
        if value is None:
            raise line_error(line, f"--{name} has no value", f"write --{name}=…")
        if name in seen and name not in REPEATABLE_FLAGS:
            raise line_error(line, f"--{name} is there twice", "remove one")
        seen.add(name)
    if not instruction.rest.strip():
        raise line_error(line, f"{keyword} has no arguments", "write them after it, or remove the line")
    if keyword in ("COPY", "ADD"):
        words = copy_words(instruction, escape)
        if len(words) < 2:
            raise line_error(line, f"{keyword} has no destination", f"write {keyword} SOURCE… DESTINATION")
        for word in words[:-1]:
            check_is_local(word.strip("\"'"), keyword, line)
    if keyword == "RUN":
        parse_mounts(instruction)


def check_is_local(source: str, keyword: str, line: int) -> None:
    """Raises ImageError for a source of COPY or ADD that would be downloaded."""
    if REMOTE.match(source):
        raise unsupported(line, f"{keyword} of {source} is not supported", "download it in a RUN step: curl or git")


def copy_words(instruction: Instruction, escape: str) -> tuple[str, ...]:
    """The sources and the destination of COPY and ADD, not expanded."""
    words = instruction.parse_json()
    return tuple(split_quoted(instruction.rest, escape)) if words is None else words


def parse_mounts(instruction: Instruction) -> tuple[RunMount, ...]:
    """The mounts of a RUN. Values are not expanded."""
    mounts = []
    for name, value in instruction.flags:
        if name == "mount":
            mounts.append(_parse_mount(value or "", instruction.line))
    return tuple(mounts)


def _parse_mount(text: str, line: int) -> RunMount:
    options: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        options[key.strip().lower()] = value
    kind = options.get("type", "bind")
    if kind not in MOUNT_OPTIONS:
        raise unsupported(line, f"RUN --mount=type={kind} is not supported", "use type=cache or type=bind")
    unknown = sorted(options.keys() - MOUNT_OPTIONS[kind])
    if unknown:
        raise line_error(line, f"RUN --mount=type={kind} has no option {unknown[0]!r}", "remove it")
    if kind == "cache" and (options.keys() & {"from", "source", "src"}):
        raise unsupported(line, "a cache that starts from a stage is not supported", "remove from= and source=")
    if options.get("sharing", CACHE_SHARING[0]) not in CACHE_SHARING:
        raise line_error(line, f"RUN --mount has sharing={options['sharing']}", f"use {', '.join(CACHE_SHARING)}")
    for name, pattern in MOUNT_NUMBERS.items():
        if not pattern.fullmatch(options.get(name, "0")):
            raise line_error(line, f"RUN --mount has {name}={options[name]}", "give a number")
    mount = RunMount(kind, options)
    if not mount.target:
        raise line_error(line, "RUN --mount has no target", "write target=/FOLDER")
    return mount
