"""Scans of a folder: only what changed is read, nothing is followed, and no entry can break the scan."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddock.errors import SandboxError
from paddock.sandbox import folder_scan
from paddock.sandbox.folder_scan import FolderScan, ScanOptions, scan_folder
from paddock.sandbox.guest.files import acting_as

NOBODY = 65534
OLD = 1_600_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    tmp_path.chmod(0o755)
    (tmp_path / "src").mkdir()
    (tmp_path / "a.txt").write_text("alpha")
    (tmp_path / "src" / "b.txt").write_text("beta")
    yield tmp_path
    for path in tmp_path.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)


def scan(folder: Path, earlier: FolderScan | None = None, *, user: int | None = None, **options: Any) -> FolderScan:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        chosen = ScanOptions(**{"file_bytes": 1000, "total_bytes": 10_000, **options})
        with acting_as(user):
            return scan_folder(descriptor, earlier or FolderScan(), chosen)
    finally:
        os.close(descriptor)


def kinds(result: FolderScan) -> dict[str, str]:
    return {path: entry.state.kind for path, entry in sorted(result.entries.items())}


def test_every_kind_of_entry_is_found(folder: Path) -> None:
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "dangling").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        result = scan(folder)
    assert kinds(result) == {
        "a.txt": "file",
        "dangling": "link",
        "link": "link",
        "pipe": "other",
        "socket": "other",
        "src": "folder",
        "src/b.txt": "file",
    }
    assert result.entries["link"].state.target == "/etc/passwd"
    assert sorted(result.contents.values()) == [b"alpha", b"beta"]


def test_only_changed_files_are_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_scan, "SETTLED_NS", -10_000_000_000)
    first = scan(folder)
    (folder / "a.txt").write_text("alpha 2")
    (folder / "src" / "b.txt").chmod(0o600)
    read: list[str] = []
    monkeypatch.setattr(folder_scan, "read_regular", lambda fd, name, limit: read.append(name) or os.read(fd, limit))
    second = scan(folder, first)
    assert sorted(read) == ["a.txt", "b.txt"]
    assert second.entries["src/b.txt"].state.mode == 0o600
    read.clear()
    assert scan(folder, second).entries == second.entries
    assert read == []


def test_a_file_that_has_just_changed_is_read_again(folder: Path) -> None:
    """The clock of the file system is coarse: a second change may have the same status."""
    first = scan(folder)
    assert first.entries["a.txt"].stamp is None


def test_a_change_with_the_old_time_and_size_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_scan, "SETTLED_NS", -10_000_000_000)
    os.utime(folder / "a.txt", (OLD, OLD))
    first = scan(folder)
    (folder / "a.txt").write_text("ALPHA")
    os.utime(folder / "a.txt", (OLD, OLD))
    assert scan(folder, first).entries["a.txt"].state != first.entries["a.txt"].state


def test_a_renamed_folder_gives_no_new_content(folder: Path) -> None:
    first = scan(folder)
    (folder / "src").rename(folder / "lib")
    second = scan(folder, first, stored=set(first.contents))
    assert kinds(second) == {"a.txt": "file", "lib": "folder", "lib/b.txt": "file"}
    assert second.contents == {}


def test_limits_leave_contents_out_and_say_so(folder: Path) -> None:
    (folder / "large").write_bytes(bytes(1001))
    result = scan(folder, total_bytes=5)
    assert result.entries["large"].state.reason == "it is larger than 1000 bytes"
    reasons = {result.entries[name].state.reason for name in ("a.txt", "src/b.txt")}
    assert reasons == {None, "the snapshots of the rollout have reached their size limit"}
    assert scan(folder, refuse=lambda content: "secret").contents == {}


def test_folders_of_tools_are_left_out(folder: Path) -> None:
    (folder / "node_modules" / "x").mkdir(parents=True)
    result = scan(folder)
    assert "node_modules/x" not in result.entries
    assert result.left_out == {"node_modules": "its content can be made again"}


def test_too_many_entries_are_an_error(folder: Path) -> None:
    with pytest.raises(SandboxError, match="more than 2 entries"):
        scan(folder, most_entries=2)


def test_what_cannot_be_read_is_named_and_not_lost(folder: Path) -> None:
    first = scan(folder)
    (folder / "a.txt").chmod(0)
    (folder / "src").chmod(0)
    result = scan(folder, first, user=NOBODY if os.geteuid() == 0 else None)
    assert "cannot be read" in (result.entries["a.txt"].state.reason or "")
    assert "cannot be read" in result.left_out["src"]
    assert "src/b.txt" in result.entries
    assert (folder / "a.txt").stat().st_mode & 0o777 == 0


def test_files_that_vanish_are_no_entries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = folder_scan.kind_of

    def vanish(status: os.stat_result) -> str:
        for path in folder.rglob("*.txt"):
            path.unlink()
        return read(status)

    monkeypatch.setattr(folder_scan, "kind_of", vanish)
    assert set(scan(folder).entries) <= {"src"}


def test_names_that_are_no_text_are_kept(folder: Path) -> None:
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff.txt"))).write_text("x")
    assert os.fsdecode(b"\xff.txt") in scan(folder).entries
