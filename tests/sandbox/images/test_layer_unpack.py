"""Unpacking layers: what they become, and that hostile ones stay in their folder."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import stat
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import pytest
from tests.sandbox.images.archives import COMPRESSIONS, Member, folder, hard_link, make_tar, symlink

from paddock.errors import ImageError
from paddock.sandbox.images.layer_pack import pack_layer
from paddock.sandbox.images.layer_stream import UnpackLimits
from paddock.sandbox.images.layer_unpack import UnpackResult, unpack_layer
from paddock.sandbox.images.tar_reader import parse_pax

OPAQUE = "user.overlay.opaque"


def unpack(target: Path, archive: bytes, limits: UnpackLimits | None = None) -> UnpackResult:
    """As the one user that runs the test: owners are tested in user namespaces."""
    target.mkdir(exist_ok=True)
    descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return unpack_layer(io.BytesIO(archive), descriptor, limits or UnpackLimits(), id_count=0)
    finally:
        os.close(descriptor)


def is_whiteout(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


@pytest.mark.parametrize("compress", COMPRESSIONS.values(), ids=COMPRESSIONS)
def test_a_layer_becomes_a_folder(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    archive = make_tar(
        folder("etc", mode=0o555, mtime=1_600_000_000),
        Member("etc/hosts", b"hello" * 1000, mode=0o640, pax=(("SCHILY.xattr.user.note", "kept"),)),
        symlink("link", "etc/hosts"),
        hard_link("etc/again", "etc/hosts"),
        Member("pipe", kind=tarfile.FIFOTYPE),
        Member("bin/su", b"#!", mode=0o4755),
        Member("n" * 150, b"long name"),
        Member("dev/null", kind=tarfile.CHRTYPE),
    )
    blob = compress(archive)
    result = unpack(tmp_path / "layer", blob)
    root = tmp_path / "layer"
    assert (root / "etc/hosts").read_bytes() == b"hello" * 1000
    assert (root / "etc/hosts").stat().st_mode & 0o7777 == 0o640
    assert (root / "etc/hosts").stat().st_mtime == 1_700_000_000
    assert (root / "etc").stat().st_mtime == 1_600_000_000
    assert (root / "etc").stat().st_mode & 0o7777 == 0o555
    assert os.getxattr(root / "etc/hosts", "user.note") == b"kept"
    assert os.readlink(root / "link") == "etc/hosts"
    assert (root / "etc/again").stat().st_ino == (root / "etc/hosts").stat().st_ino
    assert stat.S_ISFIFO((root / "pipe").lstat().st_mode)
    assert (root / "bin/su").stat().st_mode & 0o7777 == 0o4755
    assert (root / ("n" * 150)).read_bytes() == b"long name"
    assert not (root / "dev/null").exists()
    assert result.left_out_devices == 1
    assert result.diff_id == f"sha256:{hashlib.sha256(archive).hexdigest()}"
    assert result.digest == f"sha256:{hashlib.sha256(blob).hexdigest()}"


def test_whiteouts_are_in_the_form_of_overlayfs(tmp_path: Path) -> None:
    archive = make_tar(
        folder("a"),
        Member("a/.wh.gone"),
        folder("b"),
        Member("b/.wh..wh..opq"),
        Member(".wh.new-folder"),
        folder("new-folder"),
        folder("old-folder"),
        Member(".wh.old-folder"),
        Member(".wh.file"),
        Member("file", b"new"),
        Member(".wh.implicit"),
        Member("implicit/file", b"new"),
        Member(".wh..wh.plnk", b"aufs"),
    )
    unpack(tmp_path / "layer", archive)
    root = tmp_path / "layer"
    assert is_whiteout(root / "a/gone")
    for name in ("b", "new-folder", "old-folder", "implicit"):
        assert os.getxattr(root / name, OPAQUE) == b"y"
    assert (root / "file").read_bytes() == (root / "implicit/file").read_bytes() == b"new"
    assert sorted(os.listdir(root)) == ["a", "b", "file", "implicit", "new-folder", "old-folder"]


OUTSIDE = "outside"


def leading_out(secret: str) -> dict[str, tuple[Member, ...]]:
    """Archives that try to write to the folder `secret`, beside the folder of the layer."""
    return {
        "parent": (Member("../outside/x", b"!"),),
        "parent in the middle": (Member("a/../../outside/x", b"!"),),
        "absolute": (Member(f"{secret}/x", b"!"),),
        "symlink": (symlink("a", "../outside"), Member("a/x", b"!")),
        "absolute symlink": (symlink("a", secret), Member("a/x", b"!")),
        "chain of symlinks": (symlink("a", "b"), symlink("b", "../../../.."), Member(f"a{secret}/x", b"!")),
        "file through a symlink": (symlink("a", f"{secret}/victim"), Member("a", b"!")),
        "folder over a symlink": (symlink("a", secret), folder("a", mode=0o777), Member("a/x", b"!")),
        "folder replaced by a symlink": (
            folder("a"),
            Member("a/y", b""),
            symlink("a", secret),
            Member("a/x", b"!"),
            folder("a/victim"),
        ),
        "hard link": (hard_link("a", "../outside/victim"), Member("a", b"!")),
        "hard link through a symlink": (symlink("s", secret), hard_link("a", "s/victim"), Member("a", b"!")),
        "hard link to a symlink": (symlink("s", f"{secret}/victim"), hard_link("a", "s"), Member("a/b", b"!")),
        "mode through a symlink": (folder("a", mode=0o777), symlink("a", secret)),
        "whiteout": (Member("../.wh.outside"),),
        "whiteout of the parent": (Member(".wh..."),),
        "whiteout of the folder itself": (Member("a/.wh.."),),
        "whiteout without a name": (Member("a/.wh."),),
        "whiteout through a symlink": (symlink("a", secret), Member("a/.wh.victim")),
        "opaque through a symlink": (symlink("a", secret), Member("a/.wh..wh..opq")),
        "fifo through a symlink": (symlink("a", secret), Member("a/x", kind=tarfile.FIFOTYPE)),
        "symlink loop": (symlink("a", "b"), symlink("b", "a"), Member("a/x", b"!")),
        "file as a folder": (Member("a", b""), Member("a/x", b"!")),
        "hard link to a folder": (folder("a"), hard_link("b", "a")),
        "hard link to nothing": (hard_link("b", "a"),),
        "hard link to a whiteout": (Member(".wh.a"), hard_link("b", "a")),
        "deep folders": (Member("d/" * 300 + "x", b"!"),),
        "long name": (Member("n" * 300, b"!"),),
        "zero byte": (Member("a", b"!", pax=(("path", "a\0b"),)),),
        "unknown kind": (Member("a", b"!", kind=b"Z"),),
        "sparse": (Member("a", b"!", pax=(("GNU.sparse.major", "1"),)),),
    }


@pytest.mark.parametrize("name", leading_out("/x"))
def test_a_hostile_archive_writes_nothing_outside(tmp_path: Path, name: str) -> None:
    outside = tmp_path / OUTSIDE
    outside.mkdir(mode=0o700)
    victim = outside / "victim"
    victim.write_bytes(b"untouched")
    before = (outside.stat(), victim.stat())
    with suppress(ImageError):
        unpack(tmp_path / "layer", make_tar(*leading_out(str(outside))[name]))
    assert os.listdir(outside) == ["victim"]
    assert victim.read_bytes() == b"untouched"
    assert sorted(os.listdir(tmp_path)) == ["layer", OUTSIDE]
    assert [status.st_mode for status in before] == [outside.stat().st_mode, victim.stat().st_mode]
    assert OPAQUE not in os.listxattr(outside)


REFUSED = (
    "parent",
    "hard link",
    "whiteout of the parent",
    "whiteout of the folder itself",
    "whiteout without a name",
    "symlink loop",
    "file as a folder",
    "hard link to a folder",
    "hard link to nothing",
    "hard link to a whiteout",
    "deep folders",
    "long name",
    "unknown kind",
    "sparse",
)


@pytest.mark.parametrize("name", REFUSED)
def test_an_archive_that_makes_no_sense_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImageError) as caught:
        unpack(tmp_path / "layer", make_tar(*leading_out("/x")[name]))
    assert caught.value.hint


def test_an_error_names_its_entry_once(tmp_path: Path) -> None:
    with pytest.raises(ImageError) as caught:
        unpack(tmp_path / "layer", make_tar(Member("a/.wh...")))
    assert str(caught.value.message).count("a/.wh...") == 1


def test_extension_headers_of_one_entry_have_a_limit(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 600 * 1024
    record = b"614400 comment=".ljust(header.size - 1, b"v") + b"\n"
    archive = 2 * (header.tobuf() + record) + make_tar(Member("a", b""))
    with pytest.raises(ImageError, match="1228800 bytes"):
        unpack(tmp_path / "layer", archive)


def test_a_pax_header_of_many_records_is_read_in_linear_time() -> None:
    started = perf_counter()
    assert parse_pax(b"5 a=\n" * 200_000) == {"a": b""}
    assert perf_counter() - started < 5


def test_links_are_resolved_within_the_layer(tmp_path: Path) -> None:
    archive = make_tar(folder("usr/lib"), symlink("lib", "/usr/lib"), Member("lib/x", b"1"), folder("up"))
    unpack(tmp_path / "layer", archive)
    assert (tmp_path / "layer/usr/lib/x").read_bytes() == b"1"
    assert os.readlink(tmp_path / "layer/lib") == "/usr/lib"


def test_later_entries_replace_earlier_ones(tmp_path: Path) -> None:
    archive = make_tar(
        Member("a", b"1"),
        Member("a", b"2"),
        folder("b"),
        Member("b/inner", b""),
        Member("b", b"a file now"),
        Member("c", b""),
        folder("c"),
        Member("Case", b"1"),
        Member("case", b"2"),
        symlink("l", "one"),
        Member("l/x", b"1"),
        symlink("l", "two"),
        Member("l/x", b"2"),
    )
    unpack(tmp_path / "layer", archive)
    root = tmp_path / "layer"
    assert (root / "a").read_bytes() == b"2"
    assert (root / "b").read_bytes() == b"a file now"
    assert (root / "c").is_dir()
    assert ((root / "Case").read_bytes(), (root / "case").read_bytes()) == (b"1", b"2")
    assert ((root / "one/x").read_bytes(), (root / "two/x").read_bytes()) == (b"1", b"2")


def test_attributes_of_overlayfs_are_left_out(tmp_path: Path) -> None:
    pax = (("SCHILY.xattr.user.overlay.opaque", "y"), ("SCHILY.xattr.trusted.x", "y"))
    unpack(tmp_path / "layer", make_tar(folder("a", pax=pax)))
    assert os.listxattr(tmp_path / "layer/a") == []


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (UnpackLimits(max_bytes=100_000), "100000 bytes"),
        (UnpackLimits(max_entries=2), "2 entries"),
        (UnpackLimits(max_ratio=10, ratio_from_bytes=50_000), "10 times"),
    ],
    ids=["bytes", "entries", "ratio"],
)
@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, bz2.compress], ids=["gzip", "xz", "bzip2"])
def test_a_bomb_is_refused(
    tmp_path: Path, limits: UnpackLimits, message: str, compress: Callable[[bytes], bytes]
) -> None:
    archive = make_tar(*(Member(f"zeros-{number}", bytes(500_000)) for number in range(3)))
    with pytest.raises(ImageError, match=message):
        unpack(tmp_path / "layer", compress(archive), limits)


@pytest.mark.parametrize("cut", [10, 512, 700, 1500, 2600])
def test_a_truncated_archive_is_refused(tmp_path: Path, cut: int) -> None:
    archive = make_tar(Member("a", b"1" * 1000), Member("b", b"2" * 1000))
    with pytest.raises(ImageError):
        unpack(tmp_path / "layer", archive[:cut] if cut != 512 else archive[:cut] + b"x" * 600)
    with pytest.raises(ImageError):
        unpack(tmp_path / "other", gzip.compress(archive)[: 30 + cut % 50])


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    archive = bytearray(make_tar(Member("a", b"1"), Member("b", b"2")))
    archive[1024] ^= 1
    with pytest.raises(ImageError, match="checksum"):
        unpack(tmp_path / "layer", bytes(archive))


def test_a_layer_survives_packing(tmp_path: Path) -> None:
    archive = make_tar(
        folder("a", mode=0o700),
        Member("a/x", b"1", mode=0o600, pax=(("SCHILY.xattr.user.note", "kept"),)),
        hard_link("a/y", "a/x"),
        symlink("l", "nowhere"),
        Member("a/.wh.gone"),
        folder("o"),
        Member("o/.wh..wh..opq"),
        Member("ü" * 80, b"2"),
    )
    unpack(tmp_path / "one", archive)
    packed = pack(tmp_path / "one")
    unpack(tmp_path / "two", packed)
    assert pack(tmp_path / "two") == packed
    assert is_whiteout(tmp_path / "two/a/gone")
    assert os.getxattr(tmp_path / "two/o", OPAQUE) == b"y"
    assert os.getxattr(tmp_path / "two/a/x", "user.note") == b"kept"
    assert (tmp_path / "two/a/x").stat().st_nlink == 2


def pack(source: Path) -> bytes:
    buffer = io.BytesIO()
    descriptor = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    pack_layer(descriptor, buffer)
    os.close(descriptor)
    return buffer.getvalue()
