"""Builds from scratch: no base image and no RUN, so they need no program of an image."""

import asyncio
import io
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paddock.errors import ImageError
from paddock.sandbox.images.build import build_image
from paddock.sandbox.images.dockerfiles.context import BuildContext
from paddock.sandbox.images.dockerfiles.events import BuildEvent, BuildLog
from paddock.sandbox.images.image import ImageConfig
from paddock.sandbox.images.layer_worker import set_rights
from paddock.sandbox.images.oci import make_image
from paddock.sandbox.images.store import ImageStore
from paddock.sandbox.network.policy import NO_NETWORK

if TYPE_CHECKING:
    from paddock.sandbox.images.image import Image


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


class Build:
    """One build, its events, and the files of the result."""

    def __init__(self, store: ImageStore, dockerfile: str, files: Mapping[str, bytes] | Path, **options: str) -> None:
        self.store = store
        self.events: list[BuildEvent] = []
        context = BuildContext(files) if isinstance(files, Path) else files
        self.image: Image = asyncio.run(
            build_image(
                dockerfile,
                context,
                network=NO_NETWORK,
                timeout=30.0,
                store=store,
                on_progress=self.events.append,
                **options,  # type: ignore[arg-type]
            )
        )

    @property
    def results(self) -> list[str]:
        return [event.kind for event in self.events if event.kind in ("cached", "done", "failed")]

    def files(self) -> dict[str, tuple[str, int, int]]:
        """Content or target, mode and owner of everything in the image."""
        entries: dict[str, tuple[str, int, int]] = {}
        with self.store.hold(self.image) as layers:
            for layer in layers:
                for path in sorted(layer.rglob("*")):
                    status = path.lstat()
                    if path.is_symlink():
                        content = f"-> {os.readlink(path)}"
                    else:
                        content = "folder" if path.is_dir() else path.read_text()
                    owner = status.st_uid - (self.store.identity.host_uid(0) or 0)
                    entries[str(path.relative_to(layer))] = (content, status.st_mode & 0o7777, owner)
        return entries

    def contents(self) -> dict[str, str]:
        return {name: entry[0] for name, entry in self.files().items() if entry[0] != "folder"}


FILES = {"a.txt": b"A", "b.txt": b"B", "dir/c.txt": b"C", "dir/deep/d.sh": b"#!/bin/sh\n"}


@pytest.mark.parametrize(
    ("copy", "expected"),
    [
        ("COPY a.txt /x", {"x": "A"}),
        ("COPY a.txt /x/", {"x/a.txt": "A"}),
        ("COPY *.txt /x/", {"x/a.txt": "A", "x/b.txt": "B"}),
        ("COPY dir /x", {"x/c.txt": "C", "x/deep/d.sh": "#!/bin/sh\n"}),
        ("COPY dir /x/", {"x/c.txt": "C", "x/deep/d.sh": "#!/bin/sh\n"}),
        ("COPY dir/ a.txt /x/", {"x/c.txt": "C", "x/deep/d.sh": "#!/bin/sh\n", "x/a.txt": "A"}),
        ("WORKDIR /w\nCOPY a.txt .", {"w/a.txt": "A"}),
        ("WORKDIR /w\nCOPY a.txt b/../c", {"w/c": "A"}),
        ("COPY a.txt b.txt /x/\nCOPY dir/c.txt /x/a.txt", {"x/a.txt": "C", "x/b.txt": "B"}),
        ('COPY ["a.txt", "/with space/"]', {"with space/a.txt": "A"}),
        ("ARG n=a\nENV d=/to\nCOPY ${n}.txt $d/", {"to/a.txt": "A"}),
        ("COPY none* a.txt /x/", {"x/a.txt": "A"}),
        ("COPY <<ONE <<'TWO' /x/\n$HOME${missing:-1}\nONE\n$HOME\nTWO", {"x/ONE": "1\n", "x/TWO": "$HOME\n"}),
        ('COPY <<EOF /x\n  it\'s "$missing"\nEOF', {"x": '  it\'s ""\n'}),
    ],
)
def test_where_copies_go(store: ImageStore, copy: str, expected: dict[str, str]) -> None:
    assert Build(store, f"FROM scratch\n{copy}\n", FILES).contents() == expected


def test_owners_and_modes(store: ImageStore) -> None:
    files = {**FILES, "passwd": b"root:x:0:0::/:\nme:x:12:34::/:\n", "group": b"root:x:0:\nthem:x:56:\n"}
    build = Build(
        store,
        "FROM scratch\nCOPY passwd group /etc/\nCOPY --chown=me --chmod=750 a.txt /p/q/x\nCOPY dir/deep/d.sh /d.sh\n"
        "COPY --chown=7:them b.txt /b\nUSER me\nWORKDIR /w/own\n",
        files,
    )
    entries = build.files()
    is_range = store.identity.kind == "range"
    assert entries["d.sh"] == ("#!/bin/sh\n", 0o755, 0)
    assert entries["p/q/x"][:2] == ("A", 0o750)
    assert entries["p/q"][:2] == ("folder", 0o755)
    if is_range:
        assert (entries["p/q/x"][2], entries["p/q"][2], entries["b"][2]) == (12, 12, 7)
        assert (entries["w"][2], entries["w/own"][2]) == (12, 12)


def test_a_base_with_onbuild_is_refused(store: ImageStore) -> None:
    store.save(make_image("trap", (), ImageConfig(on_build=("RUN pip install .",))))
    with pytest.raises(ImageError, match=r"line 1: trap has ONBUILD .*pip install"):
        Build(store, "FROM trap\n", {})


def test_a_new_cache_folder_has_the_rights_of_its_mount(store: ImageStore) -> None:
    folder = store.stage_layer()
    set_rights(folder, store.identity, 0o750, 12, 34)
    status = folder.stat()
    assert status.st_mode & 0o7777 == 0o750
    assert (status.st_uid, status.st_gid) == (store.identity.host_uid(12), store.identity.host_gid(34))
    store.discard_layer(folder)


def test_add_unpacks_local_archives_and_copy_does_not(store: ImageStore) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        member = tarfile.TarInfo("in/file")
        member.size, member.mode = 4, 0o640
        archive.addfile(member, io.BytesIO(b"text"))
    build = Build(store, "FROM scratch\nADD a.tgz /x\nADD a.txt /y/\n", {"a.tgz": packed.getvalue(), "a.txt": b"A"})
    assert build.contents() == {"x/in/file": "text", "y/a.txt": "A"}


def test_files_come_from_earlier_stages_by_name_and_number(store: ImageStore) -> None:
    dockerfile = """
FROM scratch AS first
COPY dir /out
FROM scratch
COPY a.txt /second/
FROM scratch
COPY --from=first /out/*.txt /out/deep /here/
COPY --from=1 second/ /there
"""
    build = Build(store, dockerfile, FILES)
    assert build.contents() == {"here/c.txt": "C", "here/d.sh": "#!/bin/sh\n", "there/a.txt": "A"}


def test_only_stages_that_the_target_needs_are_built(store: ImageStore) -> None:
    dockerfile = "FROM scratch AS a\nCOPY a.txt /a\nFROM scratch AS b\nCOPY missing /b\nFROM a AS c\nCOPY b.txt /c\n"
    build = Build(store, dockerfile, FILES, target="c")
    assert build.contents() == {"a": "A", "c": "B"}
    assert [(event.step, event.steps) for event in build.events if event.kind == "started"] == [(1, 2), (2, 2)]


def test_a_stage_starts_from_an_image_with_its_config(store: ImageStore) -> None:
    Build(store, "FROM scratch\nCOPY a.txt /a\nENV x=1\nWORKDIR /w\nUSER u\n", FILES, name="base:1")
    build = Build(store, "ARG v=1\nFROM base:$v\nENV y=${x}2\nCOPY b.txt .\n", FILES, name="derived")
    assert build.contents() == {"a": "A", "w/b.txt": "B"}
    assert build.image.config.env == {"x": "1", "y": "12"}
    assert build.image.config.user == "u"
    assert store.find("derived") == build.image


# -- the cache ----------------------------------------------------------------------------------------

THREE_STEPS = "FROM scratch\nWORKDIR /w\nCOPY a.txt /a\nCOPY b.txt /b\n"


def test_an_unchanged_build_is_a_lookup(store: ImageStore) -> None:
    first = Build(store, THREE_STEPS, FILES)
    started = time.perf_counter()
    again = Build(store, f"# comment\n{THREE_STEPS}", FILES)
    assert time.perf_counter() - started < 1.0
    assert (first.results, again.results) == (["done"] * 3, ["cached"] * 3)
    assert again.image == first.image


@pytest.mark.parametrize(
    ("dockerfile", "files", "results"),
    [
        (THREE_STEPS.replace("/b\n", "/c\n"), FILES, ["cached", "cached", "done"]),
        (THREE_STEPS, {**FILES, "b.txt": b"changed"}, ["cached", "cached", "done"]),
        (THREE_STEPS, {**FILES, "b.txt": b"#!B"}, ["cached", "cached", "done"]),
        (THREE_STEPS, {**FILES, "a.txt": b"changed"}, ["cached", "done", "done"]),
        (THREE_STEPS, {**FILES, "unused": b""}, ["cached", "cached", "cached"]),
        (THREE_STEPS.replace("COPY b", "ENV x=1\nCOPY b"), FILES, ["cached", "cached", "cached"]),
        (THREE_STEPS.replace("COPY b", "COPY --chmod=600 b"), FILES, ["cached", "cached", "done"]),
    ],
)
def test_only_what_changed_is_built_again(
    store: ImageStore, dockerfile: str, files: dict[str, bytes], results: list[str]
) -> None:
    Build(store, THREE_STEPS, FILES)
    assert Build(store, dockerfile, files).results == results


def test_concurrent_builds_make_a_layer_once(store: ImageStore) -> None:
    asyncio.run(check_concurrent_builds(store))


async def check_concurrent_builds(store: ImageStore) -> None:
    logs = [BuildLog() for _ in range(4)]
    options = {"network": NO_NETWORK, "timeout": 30.0, "store": store}
    images = await asyncio.gather(
        *(build_image(THREE_STEPS, FILES, on_progress=log.add, **options) for log in logs)  # type: ignore[arg-type]
    )
    assert len(set(image.digest for image in images)) == 1
    assert sum(log.text.count("done in") for log in logs) == 3
    assert leftovers(store) == []


def leftovers(store: ImageStore) -> list[str]:
    staging = store.folder / store.identity.key / "tmp"
    return [path.name for folder in (staging, store.folder / "locks") for path in folder.iterdir()]


def test_a_cancelled_build_leaves_nothing(store: ImageStore, tmp_path: Path) -> None:
    asyncio.run(check_cancelled_build(store, tmp_path))


async def check_cancelled_build(store: ImageStore, tmp_path: Path) -> None:
    big = tmp_path / "context"
    big.mkdir()
    (big / "a.txt").touch()
    os.truncate(big / "a.txt", 1 << 29)
    building = asyncio.ensure_future(
        build_image("FROM scratch\nCOPY a.txt /\n", big, network=NO_NETWORK, timeout=30.0, store=store)
    )
    staging = store.folder / store.identity.key / "tmp"
    while not any(staging.glob("*/fs/a.txt")):
        await asyncio.sleep(0.01)
        assert not building.done()
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert leftovers(store) == []


# -- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("COPY missing /x", "line 2: COPY missing: not in the build context"),
        ("COPY ../secret /x", "line 2: COPY ../secret: it lies outside of the build context"),
        ("COPY dir/../../x /x", "line 2: .* outside of the build context"),
        ("COPY a.txt b.txt /x", "line 2: COPY has several sources, and the destination /x is no folder"),
        ("COPY --chmod=u+x a.txt /x", "line 2: --chmod is 'u\\+x'"),
        ("COPY --chown=nobody a.txt /x", "line 2: .*: there is no user 'nobody'"),
        ("RUN --mount=source=none,target=/m x", "line 2: RUN .*: none cannot be read"),
        ("COPY --from=2 a /x", "line 2: stage 2 does not come before"),
        ("ARG u=https://example.org/x\nADD $u /x", "line 3: ADD of https://example.org/x is not supported"),
        ("COPY a.txt /x\nCOPY b.txt /x/", "line 3: .* /x is there, and is no folder"),
        ("COPY dir /x\nCOPY a.txt /x/c.txt/", "line 3: .* /x/c.txt is there, and is no folder"),
        ("COPY dir /\nCOPY a.txt /y/deep\nCOPY dir /y", "line 4: .* /y/deep is there, and is no folder"),
    ],
)
def test_errors_name_the_line(store: ImageStore, body: str, message: str) -> None:
    with pytest.raises(ImageError, match=message) as caught:
        Build(store, f"FROM scratch\n{body}\n", FILES)
    assert caught.value.hint
    assert leftovers(store) == []


def test_a_timeout_names_the_step(store: ImageStore) -> None:
    with pytest.raises(ImageError, match=r"line 2: COPY a.txt /a: the build did not end within 0 s"):
        asyncio.run(build_image("FROM scratch\nCOPY a.txt /a\n", FILES, network=NO_NETWORK, timeout=0, store=store))


def test_a_wrong_name_is_refused_before_the_build(store: ImageStore) -> None:
    with pytest.raises(ImageError, match="is not the name of an image"):
        Build(store, "FROM scratch\nCOPY a.txt /a\n", FILES, name="BAD:..")
    assert store.disk_bytes == 0


def test_a_misspelled_stage_suggests_those_that_there_are(store: ImageStore) -> None:
    dockerfile = "FROM scratch AS builder\nFROM scratch\nCOPY --from=127.0.0.1:9/bulider /a /a\n"
    with pytest.raises(ImageError, match="line 3") as caught:
        Build(store, dockerfile, FILES)
    assert "builder" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("dockerfile", "options", "message"),
    [
        ("FROM scratch\n", {"target": "x"}, "no stage 'x'"),
        ("FROM 127.0.0.1:9/not-there:1\n", {}, "line 1: 127.0.0.1:9/not-there:1 cannot be pulled"),
        ("ARG v\nFROM $v\n", {}, r"line 2: FROM \$v has no value"),
    ],
)
def test_wrong_targets_and_bases(store: ImageStore, dockerfile: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ImageError, match=message):
        Build(store, dockerfile, {}, **options)


def test_links_of_the_image_do_not_lead_out_of_it(store: ImageStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    context = tmp_path / "context"
    (context / "links").mkdir(parents=True)
    (context / "links" / "out").symlink_to(outside)
    (context / "file").write_text("x")
    build = Build(store, f"FROM scratch\nCOPY links /\nWORKDIR {outside}\nCOPY file /out/\n", context)
    assert list(outside.iterdir()) == []
    assert build.contents()[f"{str(outside)[1:]}/file"] == "x"
