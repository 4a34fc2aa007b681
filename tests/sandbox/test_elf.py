"""ELF files: what is read, and what a patch changes."""

import itertools
import shutil
import sys
from pathlib import Path

import pytest

from paddock.sandbox.elf import compare_names, encode_cache, read_elf, set_cache_path, set_interpreter


def test_a_patch_changes_the_interpreter_and_nothing_else(tmp_path: Path) -> None:
    source = Path("/bin/sh").resolve()
    before = read_elf(source)
    assert before is not None
    assert "libc.so.6" in before.needed
    copy = Path(shutil.copyfile(source, tmp_path / "sh"))
    set_interpreter(copy, before, "/run/ld.so")
    after = read_elf(copy)
    assert after is not None
    assert (after.interpreter, after.needed) == ("/run/ld.so", before.needed)
    changed = [
        at for at, (one, other) in enumerate(zip(source.read_bytes(), copy.read_bytes(), strict=True)) if one != other
    ]
    assert before.interpreter_offset <= min(changed)
    assert max(changed) < before.interpreter_offset + before.interpreter_bytes
    with pytest.raises(ValueError, match="has room for"):
        set_interpreter(copy, before, "/" + "x" * 100)


@pytest.mark.parametrize("old", ["/etc/ld.so.cache", "/nix/store/abc-glibc-2.40/etc/ld.so.cache"])
def test_the_path_of_the_cache_is_replaced(old: str) -> None:
    loader = b"code\0" + old.encode() + b"\0more, not use /etc/ld.so.cache\n"
    patched = set_cache_path(loader, "/run/paddock/ldc")
    assert len(patched) == len(loader)
    assert patched.startswith(b"code\0/run/paddock/ldc\0")
    assert patched.endswith(b"\0more, not use /etc/ld.so.cache\n")


@pytest.mark.parametrize("loader", [b"", b"/ld.so.cache\0"])
def test_a_loader_without_room_is_refused(loader: bytes) -> None:
    with pytest.raises(ValueError, match="can be replaced"):
        set_cache_path(loader, "/run/paddock/ldc")


def test_names_are_in_the_order_of_the_loader() -> None:
    """As `_dl_cache_libcmp` of glibc has it: numbers by value, digits after other characters, prefixes first."""
    names = ["liba.so", "liba.so.1", "liba.so.2", "liba.so.10", "libb.so.1", "lib2.so"]
    for (left, one), (right, other) in itertools.product(enumerate(names), repeat=2):
        sign = compare_names(one, other)
        assert (sign > 0) - (sign < 0) == (left > right) - (left < right), (one, other)


@pytest.mark.skipif(sys.byteorder != "little", reason="the format has the byte order of the machine")
def test_a_cache_names_each_library_once() -> None:
    cache = encode_cache({"libc.so.6": "/libs/libc.so.6", "libm.so.6": "/libs/libm.so.6"}, 62)
    assert cache.startswith(b"glibc-ld.so.cache1.1\x02\0\0\0")
    assert cache.count(b"/libs/libc.so.6\0") == 1
