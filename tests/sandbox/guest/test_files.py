"""Files reached through one open folder, with nothing followed."""

import asyncio
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddock.errors import SandboxError
from paddock.limits import SandboxLimits
from paddock.sandbox import open_sandbox
from paddock.sandbox.base import Command, SandboxSpec
from paddock.sandbox.guest import files


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "root").mkdir()
    (tmp_path / "secret").write_text("of the host")
    descriptor = os.open(tmp_path / "root", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_a_file_is_written_with_its_folders_and_mode(root: int, tmp_path: Path) -> None:
    files.write_file(root, ("a", "b", "c"), b"long content", 0o640)
    files.write_file(root, ("a", "b", "c"), b"short", 0o600)
    assert files.read_file(root, ("a", "b", "c"), 5) == b"short"
    assert stat.S_IMODE((tmp_path / "root/a/b/c").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["final", "middle/secret"])
def test_a_link_is_refused(root: int, tmp_path: Path, name: str) -> None:
    (tmp_path / "root/final").symlink_to(tmp_path / "secret")
    (tmp_path / "root/middle").symlink_to(tmp_path)
    with pytest.raises(SandboxError, match="link"):
        files.read_file(root, name.split("/"), 100)
    with pytest.raises(SandboxError, match="link"):
        files.write_file(root, name.split("/"), b"x", 0o644)
    assert (tmp_path / "secret").read_text() == "of the host"


def test_a_link_that_appears_while_walking_is_not_followed(root: int, tmp_path: Path) -> None:
    (tmp_path / "root/folder").mkdir()
    with files.entered(root, ("folder",)) as folder:
        (tmp_path / "root/folder").rename(tmp_path / "root/moved")
        (tmp_path / "root/folder").symlink_to(tmp_path)
        with pytest.raises(FileNotFoundError):
            os.open("secret", os.O_RDONLY, dir_fd=folder)


def test_a_file_that_grows_is_not_read_above_the_limit(root: int, tmp_path: Path) -> None:
    (tmp_path / "root/f").write_bytes(bytes(100))
    assert len(files.read_file(root, ("f",), 100)) == 100
    with pytest.raises(SandboxError, match="larger than 99"):
        files.read_file(root, ("f",), 99)


@pytest.mark.parametrize("name", ["zero\0byte", "x" * 300, "surrogate\ud800"])
def test_an_impossible_name_is_an_error_of_the_sandbox(root: int, name: str) -> None:
    with pytest.raises(SandboxError):
        files.read_file(root, (name,), 100)


def test_a_name_that_is_no_text_survives_packing(root: int, tmp_path: Path) -> None:
    odd = os.fsdecode(b"odd\xff\nname")
    (tmp_path / "root" / odd).write_text("1")
    (tmp_path / "root" / ("long" * 50)).write_text("2")
    packed = files.pack_folder(root, (), 100_000)
    files.unpack_folder(root, ("copy",), packed)
    assert [entry.path for entry in files.list_folder(root, ("copy",), 10)] == ["long" * 50, odd]


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        (["*.log"], ["keep", "keep/b.txt"]),
        (["keep"], ["a.log"]),
        (["keep/"], ["a.log"]),
        (["./keep/*.txt"], ["a.log", "keep", "keep/c.log"]),
        (["b.txt", "c.log"], ["a.log", "keep"]),
        (["log", "eep"], ["a.log", "keep", "keep/b.txt", "keep/c.log"]),
    ],
)
def test_what_is_excluded_is_not_packed(root: int, tmp_path: Path, exclude: list[str], left: list[str]) -> None:
    (tmp_path / "root/keep").mkdir()
    for name in ("a.log", "keep/b.txt", "keep/c.log"):
        (tmp_path / "root" / name).write_text(name)
    with tarfile.open(fileobj=io.BytesIO(files.pack_folder(root, (), 100_000, exclude))) as archive:
        assert archive.getnames() == left


def test_deep_folders_are_refused_rather_than_half_taken(root: int) -> None:
    with files.entered(root, ["d"] * (files.DEEPEST_FOLDER + 5), create=True):
        pass
    with pytest.raises(SandboxError, match="deeper"):
        files.pack_folder(root, (), 10_000_000)


def test_unpacking_replaces_a_link_and_fills_a_folder_that_cannot_be_written(root: int, tmp_path: Path) -> None:
    source = tmp_path / "root/source"
    (source / "closed").mkdir(parents=True)
    (source / "closed/file").write_text("inside")
    (source / "name").write_text("new")
    (source / "closed").chmod(0o555)
    packed = files.pack_folder(root, ("source",), 100_000)
    (tmp_path / "root/target").mkdir()
    (tmp_path / "root/target/name").symlink_to(tmp_path / "secret")
    files.unpack_folder(root, ("target",), packed)
    assert (tmp_path / "root/target/name").read_text() == "new"
    assert (tmp_path / "root/target/closed/file").read_text() == "inside"
    assert stat.S_IMODE((tmp_path / "root/target/closed").stat().st_mode) == 0o555
    assert (tmp_path / "secret").read_text() == "of the host"


def test_what_is_no_archive_is_refused(root: int) -> None:
    with pytest.raises(SandboxError, match="tar"):
        files.unpack_folder(root, (), b"not an archive" * 100)


def test_what_its_owner_may_not_read_is_packed_with_its_mode() -> None:
    async def pack() -> list[tuple[str, int, bytes]]:
        async with await open_sandbox("bwrap", SandboxSpec(SandboxLimits())) as sandbox:
            script = "mkdir -p shut && echo a > shut/inner && echo b > secret && chmod 000 secret shut"
            await sandbox.exec(Command(script, cwd=sandbox.workdir), timeout=10)
            await sandbox.kill()
            archive = await sandbox.pack(sandbox.workdir, limit=1 << 20)
        with tarfile.open(fileobj=io.BytesIO(archive)) as members:
            contents = [(m, members.extractfile(m)) for m in members]
            return [(m.name, m.mode, b"" if file is None else file.read()) for m, file in contents]

    assert asyncio.run(pack()) == [("secret", 0, b"b\n"), ("shut", 0, b""), ("shut/inner", 0o644, b"a\n")]
