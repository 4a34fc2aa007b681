"""The state of a stage while its instructions are read: variables in scope, and the config of the image."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from paddock.sandbox.images.dockerfiles.expansion import Expander
from paddock.sandbox.images.dockerfiles.syntax import Instruction, line_error, parse_json_list, split_quoted
from paddock.sandbox.images.image import HealthCheck, ImageConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

PROXY_ARGS = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
PREDEFINED_ARGS = frozenset({*PROXY_ARGS, *(name.lower() for name in PROXY_ARGS)})
"""They can be given without an ARG. They are no part of a step's key, so that a proxy does not change the cache."""
DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s|us|ns)")
UNIT_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
PORT = re.compile(r"[0-9]+(-[0-9]+)?(/(tcp|udp|sctp))?", re.IGNORECASE)
HIGHEST_PORT = 65535


@dataclass(frozen=True, slots=True)
class BuildInputs:
    """Values from outside: build arguments, and the platform."""

    build_args: Mapping[str, str] = field(default_factory=dict)
    platform: str = "linux/amd64"

    def platform_args(self) -> dict[str, str]:
        system, _, rest = self.platform.partition("/")
        architecture, _, variant = rest.partition("/")
        values = {"PLATFORM": self.platform, "OS": system, "ARCH": architecture, "VARIANT": variant}
        target = {f"TARGET{name}": value for name, value in values.items()}
        build = {f"BUILD{name}": value for name, value in values.items()}
        return {**target, **build, "TARGETSTAGE": "default"}


@dataclass(frozen=True, slots=True)
class BuildScope:
    """Variables and config at one place of a stage. Each instruction makes a new one."""

    inputs: BuildInputs
    global_args: Mapping[str, str]
    escape: str
    config: ImageConfig = field(default_factory=ImageConfig)
    args: Mapping[str, str] = field(default_factory=dict)
    cmd_is_own: bool = False
    """Whether this stage has set CMD: only then an ENTRYPOINT keeps it."""

    @property
    def variables(self) -> dict[str, str]:
        """What expressions and RUN see: ENV wins over ARG."""
        return {**self.args, **self.config.env}

    @property
    def step_env(self) -> dict[str, str]:
        """The environment of a RUN, with the predefined proxy arguments."""
        build_args = self.inputs.build_args
        return {**{name: build_args[name] for name in sorted(PREDEFINED_ARGS & build_args.keys())}, **self.variables}

    def expand(self, text: str, line: int) -> str:
        return Expander(self.variables, self.escape, line).expand(text)

    def expand_words(self, text: str, line: int) -> list[str]:
        return [self.expand(word, line) for word in split_quoted(text, self.escape)]

    def apply(self, instruction: Instruction) -> BuildScope:
        """The scope after an instruction that only changes variables or the config."""
        change = CHANGES[instruction.keyword]
        return change(self, instruction)

    def with_config(self, **changes: object) -> BuildScope:
        return replace(self, config=replace(self.config, **changes))  # type: ignore[arg-type]


def read_global_args(instructions: tuple[Instruction, ...], inputs: BuildInputs, escape: str) -> dict[str, str]:
    """The values of the ARGs before FROM, with those of the platform."""
    values = inputs.platform_args()
    for instruction in instructions:
        for name, default in _assignments(instruction, escape):
            if name in inputs.build_args:
                values[name] = inputs.build_args[name]
            elif default is not None:
                values[name] = Expander(values, escape, instruction.line).expand(default)
    return values


def _assignments(instruction: Instruction, escape: str) -> list[tuple[str, str | None]]:
    """The names of an ARG, each with its default."""
    assignments = []
    for word in split_quoted(instruction.rest, escape):
        name, separator, value = word.partition("=")
        if not name:
            raise line_error(instruction.line, f"ARG has {word!r}", "write ARG name, or ARG name=default")
        assignments.append((name, value if separator else None))
    return assignments


def _apply_arg(scope: BuildScope, instruction: Instruction) -> BuildScope:
    args = dict(scope.args)
    for name, default in _assignments(instruction, scope.escape):
        if name in scope.inputs.build_args:
            args[name] = scope.inputs.build_args[name]
        elif default is not None:
            variables = {**args, **scope.config.env}
            args[name] = Expander(variables, scope.escape, instruction.line).expand(default)
        elif name in scope.global_args:
            args[name] = scope.global_args[name]
    return replace(scope, args=args)


def _pairs(scope: BuildScope, instruction: Instruction) -> dict[str, str]:
    """`name=value …`, or `name value`. All values of one instruction see the variables before it."""
    words = split_quoted(instruction.rest, scope.escape)
    line, keyword = instruction.line, instruction.keyword
    if "=" not in words[0]:
        value = instruction.rest.removeprefix(words[0]).lstrip()
        if not value:
            raise line_error(line, f"{keyword} {words[0]} has no value", f"write {keyword} {words[0]}=…")
        return {scope.expand(words[0], line): scope.expand(value, line)}
    pairs = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or not name:
            raise line_error(line, f"{keyword} has {word!r}", "write name=value, with quotes around spaces")
        pairs[scope.expand(name, line)] = scope.expand(value, line)
    return pairs


def _apply_env(scope: BuildScope, instruction: Instruction) -> BuildScope:
    return scope.with_config(env={**scope.config.env, **_pairs(scope, instruction)})


def _apply_label(scope: BuildScope, instruction: Instruction) -> BuildScope:
    return scope.with_config(labels={**scope.config.labels, **_pairs(scope, instruction)})


def _apply_workdir(scope: BuildScope, instruction: Instruction) -> BuildScope:
    path = scope.expand(instruction.rest, instruction.line)
    if not path:
        raise line_error(instruction.line, "WORKDIR is empty", "write a folder after it")
    return scope.with_config(workdir=resolve_path(scope.config.workdir, path))


def _apply_user(scope: BuildScope, instruction: Instruction) -> BuildScope:
    user = scope.expand(instruction.rest, instruction.line).strip()
    if not user or any(character.isspace() for character in user):
        raise line_error(instruction.line, f"USER is {user!r}", "write USER NAME, or USER NAME:GROUP")
    return scope.with_config(user=user)


def _command_words(scope: BuildScope, instruction: Instruction) -> tuple[str, ...]:
    words = instruction.parse_json()
    return (*scope.config.shell, instruction.rest) if words is None else words


def _apply_cmd(scope: BuildScope, instruction: Instruction) -> BuildScope:
    return replace(scope.with_config(cmd=_command_words(scope, instruction)), cmd_is_own=True)


def _apply_entrypoint(scope: BuildScope, instruction: Instruction) -> BuildScope:
    changed = scope.with_config(entrypoint=_command_words(scope, instruction))
    # As Docker does: a new ENTRYPOINT drops the CMD that comes from the base.
    return changed if scope.cmd_is_own else changed.with_config(cmd=())


def _apply_shell(scope: BuildScope, instruction: Instruction) -> BuildScope:
    words = instruction.parse_json()
    if not words:
        raise line_error(instruction.line, "SHELL is no list", 'write SHELL ["/bin/bash", "-c"]')
    return scope.with_config(shell=words)


def _apply_expose(scope: BuildScope, instruction: Instruction) -> BuildScope:
    ports = list(scope.config.exposed_ports)
    for word in scope.expand_words(instruction.rest, instruction.line):
        if not PORT.fullmatch(word) or max(map(int, re.findall(r"[0-9]+", word))) > HIGHEST_PORT:
            raise line_error(instruction.line, f"EXPOSE has {word!r}", "write PORT or PORT/udp")
        port = (word if "/" in word else f"{word}/tcp").lower()
        ports += [port] if port not in ports else []
    return scope.with_config(exposed_ports=tuple(ports))


def _apply_volume(scope: BuildScope, instruction: Instruction) -> BuildScope:
    words = instruction.parse_json()
    if words is None:
        words = tuple(scope.expand_words(instruction.rest, instruction.line))
    elif words:
        words = tuple(scope.expand(word, instruction.line) for word in words)
    if not words or not all(words):
        raise line_error(instruction.line, "VOLUME has an empty path", "write VOLUME /FOLDER")
    return scope.with_config(volumes=tuple(dict.fromkeys((*scope.config.volumes, *words))))


def _apply_healthcheck(scope: BuildScope, instruction: Instruction) -> BuildScope:
    line = instruction.line
    kind, _, command = instruction.rest.partition(" ")
    if kind.upper() == "NONE" and not command.strip():
        return scope.with_config(health_check=None)
    command = command.strip()
    if kind.upper() != "CMD" or not command:
        raise line_error(line, f"HEALTHCHECK {kind} is not known", "write HEALTHCHECK CMD …, or HEALTHCHECK NONE")
    words = parse_json_list(command, line)
    flags = {name: value or "" for name, value in instruction.flags}
    check = HealthCheck((*scope.config.shell, command) if words is None else words)

    def seconds(name: str, default: float) -> float:
        return _seconds(flags[name], name, line) if name in flags else default

    retries = flags.get("retries", str(check.retries))
    if not retries.isdigit() or not int(retries):
        raise line_error(line, f"--retries is {retries!r}", "give a number from 1")
    return scope.with_config(
        health_check=HealthCheck(
            check.argv,
            interval=seconds("interval", check.interval),
            timeout=seconds("timeout", check.timeout),
            start_period=seconds("start-period", check.start_period),
            start_interval=seconds("start-interval", check.start_interval),
            retries=int(retries),
        )
    )


def _seconds(text: str, name: str, line: int) -> float:
    parts = DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise line_error(line, f"--{name} is {text!r}", "write a time such as 30s or 1m30s")
    return sum(float(number) * UNIT_SECONDS[unit] for number, unit in parts)


def resolve_path(workdir: PurePosixPath, path: str) -> PurePosixPath:
    """An absolute path without `.` and `..`. A relative one starts at the work folder."""
    parts: list[str] = []
    for part in (workdir / path).parts[1:]:
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return PurePosixPath("/", *parts)


CHANGES = {
    "ARG": _apply_arg,
    "CMD": _apply_cmd,
    "ENTRYPOINT": _apply_entrypoint,
    "ENV": _apply_env,
    "EXPOSE": _apply_expose,
    "HEALTHCHECK": _apply_healthcheck,
    "LABEL": _apply_label,
    "SHELL": _apply_shell,
    "USER": _apply_user,
    "VOLUME": _apply_volume,
    "WORKDIR": _apply_workdir,
}
"""Instructions that change variables or the config. WORKDIR also makes its folder, which is a step."""
