"""Reads and patches ELF files, as far as starting a program of this host in another root needs it.

Knows 64-bit little-endian files (x86_64, aarch64) and the loader of glibc. Patches keep every offset: programs that
carry a payload behind their code stay valid.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cmp_to_key
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

HEADER_BYTES = 64
MAGIC = b"\x7fELF\x02\x01"
"""64 bits, little-endian."""
PT_LOAD, PT_DYNAMIC, PT_INTERP = 1, 2, 3
DT_NEEDED, DT_STRTAB, DT_RPATH, DT_RUNPATH = 1, 5, 15, 29
LONGEST_STRING_BYTES = 4096
CACHE_PATH = re.compile(rb"/(?:[\w.+-]+/)*ld\.so\.cache\x00")
CACHE_MAGIC = b"glibc-ld.so.cache1.1"
LITTLE_ENDIAN_CACHE = 2
CACHE_FLAGS = {62: 0x0303, 183: 0x0A03}
"""How a cache marks libraries of the machine, by the machine number of ELF: x86_64 and aarch64."""


@dataclass(frozen=True, slots=True)
class ElfFile:
    """What the loader reads of a program or a library."""

    machine: int
    interpreter: str = ""
    """The loader that the kernel starts. Empty: a library, or a static program."""
    interpreter_offset: int = 0
    interpreter_bytes: int = 0
    needed: tuple[str, ...] = ()
    search_folders: tuple[str, ...] = ()
    """From RPATH and RUNPATH; `$ORIGIN` is not replaced."""


@dataclass(frozen=True, slots=True)
class Segment:
    kind: int
    offset: int
    address: int
    size: int


def read_elf(path: Path) -> ElfFile | None:
    """None for a file that is no ELF file of a known kind, or is damaged."""
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
            return None
        try:
            return _parse(file, header)
        except (struct.error, ValueError):
            return None


def _parse(file: BinaryIO, header: bytes) -> ElfFile:
    (machine,) = struct.unpack_from("<H", header, 18)
    (table,) = struct.unpack_from("<Q", header, 32)
    size, count = struct.unpack_from("<HH", header, 54)
    segments = []
    for position in range(count):
        kind, _, offset, address, _, length = struct.unpack_from(
            "<IIQQQQ", _read_at(file, table + position * size, 56)
        )
        segments.append(Segment(kind, offset, address, length))
    interpreter = next((each for each in segments if each.kind == PT_INTERP), None)
    needed, folders = _read_dynamic(file, segments)
    if interpreter is None:
        return ElfFile(machine, needed=needed, search_folders=folders)
    name = _read_at(file, interpreter.offset, interpreter.size).rstrip(b"\0").decode()
    return ElfFile(machine, name, interpreter.offset, interpreter.size, needed, folders)


def _read_dynamic(file: BinaryIO, segments: list[Segment]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    dynamic = next((each for each in segments if each.kind == PT_DYNAMIC), None)
    if dynamic is None:
        return (), ()
    content = _read_at(file, dynamic.offset, dynamic.size)
    entries = list(struct.iter_unpack("<QQ", content[: len(content) // 16 * 16]))
    table = next((value for tag, value in entries if tag == DT_STRTAB), None)
    if table is None:
        return (), ()
    loaded = [each for each in segments if each.kind == PT_LOAD]
    load = next((each for each in loaded if 0 <= table - each.address < each.size), None)
    if load is None:
        return (), ()
    start = load.offset + table - load.address

    def text(offset: int) -> str:
        file.seek(start + offset)
        return file.read(LONGEST_STRING_BYTES).split(b"\0", 1)[0].decode()

    needed = tuple(text(value) for tag, value in entries if tag == DT_NEEDED)
    paths = [text(value) for tag, value in entries if tag in (DT_RPATH, DT_RUNPATH)]
    return needed, tuple(folder for path in paths for folder in path.split(":") if folder)


def _read_at(file: BinaryIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    return file.read(count)


def set_interpreter(path: Path, elf: ElfFile, interpreter: str) -> None:
    """Change which loader starts the program. Raises ValueError if the path is longer than the present one."""
    content = interpreter.encode() + b"\0"
    if len(content) > elf.interpreter_bytes:
        raise ValueError(f"{path} has room for {elf.interpreter_bytes} bytes, not for {interpreter}")
    with path.open("r+b") as file:
        file.seek(elf.interpreter_offset)
        file.write(content.ljust(elf.interpreter_bytes, b"\0"))


def set_cache_path(loader: bytes, path: str) -> bytes:
    """The loader with another path of its list of libraries. Raises ValueError if it has none, or too short a one."""
    content = path.encode() + b"\0"
    match = CACHE_PATH.search(loader)
    if match is None or len(match[0]) < len(content):
        raise ValueError("the loader has no path of a cache that can be replaced")
    return loader[: match.start()] + content.ljust(len(match[0]), b"\0") + loader[match.end() :]


def encode_cache(libraries: Mapping[str, str], machine: int) -> bytes:
    """The file in which glibc's loader looks up the path of a library by its name."""
    names = sorted(libraries, key=cmp_to_key(compare_names), reverse=True)
    strings, offsets = bytearray(), []
    start = 48 + 24 * len(names)
    for name in names:
        offsets.append((start + len(strings), start + len(strings) + len(name) + 1))
        strings += f"{name}\0{libraries[name]}\0".encode()
    header = struct.pack("<20sIIB3xI12x", CACHE_MAGIC, len(names), len(strings), LITTLE_ENDIAN_CACHE, 0)
    entries = b"".join(struct.pack("<iIIIQ", CACHE_FLAGS[machine], key, value, 0, 0) for key, value in offsets)
    return header + entries + bytes(strings)


def compare_names(left: str, right: str) -> int:
    """The order of the loader's binary search: numbers by their value, a digit after every other character."""
    left_parts, right_parts = (re.findall(r"\d+|\D", name) for name in (left, right))
    for one, other in zip(left_parts, right_parts, strict=False):
        if one[0].isdigit() != other[0].isdigit():
            return 1 if one[0].isdigit() else -1
        first, second = (int(one), int(other)) if one[0].isdigit() else (ord(one), ord(other))
        if first != second:
            return -1 if first < second else 1
    return len(left_parts) - len(right_parts)
