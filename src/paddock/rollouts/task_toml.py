"""The task.toml of a task folder: its keys, their types, and the limits they become. Reads no files."""

from __future__ import annotations

import re
import tomllib
from datetime import date, datetime, time
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError, TaskError
from paddock.rollouts.limits import GIBIBYTE, MEBIBYTE, SandboxLimits, Timeouts

if TYPE_CHECKING:
    from pathlib import Path

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
UNITS = {"": 1, "K": 1024, "M": MEBIBYTE, "G": GIBIBYTE, "T": 1024 * GIBIBYTE}


class TaskToml:
    """What task.toml says. Every key that is asked for is known; the others are collected."""

    def __init__(self, file: Path, text: str) -> None:
        self._file = file
        self._known: set[str] = {"version", "schema_version", "metadata"}
        try:
            self._data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise TaskError(f"{self._file} is not valid TOML: {error}", hint="correct the file") from error

        self.name = self._text("task", "name")
        self.setup = self._text("environment", "setup")
        self.docker_image = self._text("environment", "docker_image")
        self.not_built = (["docker_image"] if self.docker_image else []) + self._machine()
        timeouts = {
            "agent": self._number("agent", "timeout_sec"),
            "verifier": self._number("verifier", "timeout_sec"),
            "setup": self._number("environment", "build_timeout_sec"),
        }
        cpus = self._number("environment", "cpus")
        limits = {
            "cpus": None if cpus is None else max(1, round(cpus)),
            "memory_bytes": self._size("memory"),
            "disk_bytes": self._size("storage"),
        }
        try:
            self.timeouts = Timeouts(**{key: value for key, value in timeouts.items() if value is not None})
            self.sandbox = SandboxLimits(**{key: value for key, value in limits.items() if value is not None})
        except ConfigError as error:
            raise TaskError(f"{self._file}: {error}", hint=error.hint) from error
        self.metadata = self._metadata()
        self.unknown = sorted(self._unknown())

    def _machine(self) -> list[str]:
        """Keys that ask for more than one Linux machine without a GPU, or for more than one scored step."""
        found = [
            name for name in ("gpus", "gpu_types", "tpu", "mcp_servers") if self._section("environment").get(name)
        ]
        system = str(self._section("environment").get("os") or "linux").lower()
        found += [] if system == "linux" else ["os"]
        separate = self._section("verifier").get("environment_mode") == "separate"
        steps = ["steps"] if self._data.get("steps") else []
        return [
            *(f"environment.{name}" for name in found),
            *(["verifier.environment_mode"] if separate else []),
            *steps,
        ]

    def _section(self, name: str) -> dict[str, Any]:
        section = self._data.get(name, {})
        if not isinstance(section, dict):
            raise TaskError(
                f"{self._file}: {name} is {section!r}, not a section", hint=f"write [{name}] on its own line"
            )
        return section

    def _value(self, section: str, key: str) -> object:
        self._known.add(f"{section}.{key}")
        return self._section(section).get(key)

    def _text(self, section: str, key: str) -> str:
        value = self._value(section, key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise TaskError(f"{self._file}: [{section}] {key} is {value!r}, not text", hint=f'write {key} = "…"')
        return value

    def _number(self, section: str, key: str) -> float | None:
        value = self._value(section, key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise TaskError(
                f"{self._file}: [{section}] {key} is {value!r}, not a number above 0",
                hint=f"write {key} = {'2' if key == 'cpus' else '600'}",
            )
        return value

    def _size(self, what: str) -> int | None:
        """`memory_mb = 2048` or `memory = "2G"`, in bytes."""
        mebibytes = self._number("environment", f"{what}_mb")
        text = self._text("environment", what)
        if mebibytes is not None and text:
            raise TaskError(f"{self._file}: both {what} and {what}_mb are given", hint="keep one of them")
        if mebibytes is not None:
            return int(mebibytes * MEBIBYTE)
        if not text:
            return None
        found = SIZE.fullmatch(text.strip())
        size = int(float(found[1]) * UNITS[found[2].upper()]) if found else 0
        if size <= 0:
            raise TaskError(f"{self._file}: [environment] {what} is {text!r}", hint=f'write {what} = "4G"')
        return size

    def _metadata(self) -> dict[str, Any]:
        metadata = {key: _plain(value) for key, value in self._section("metadata").items()}
        for key in ("description", "authors", "keywords"):
            value = self._value("task", key)
            if value is not None:
                metadata.setdefault(key, _plain(value))
        return metadata

    def _unknown(self) -> list[str]:
        found: list[str] = []
        for key, value in self._data.items():
            if key in self._known:
                continue
            names = [f"{key}.{name}" for name in value] if isinstance(value, dict) else [key]
            found += [name for name in names if name not in self._known]
        return found


def _plain(value: Any) -> Any:
    """What TOML knows and JSON does not, as text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime | date | time) else value
