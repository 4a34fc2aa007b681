"""The store: names, holds, limits, and folders as root of a user namespace."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sandbox.images.archives import Member, folder, make_tar, symlink

from paddock.errors import ImageError
from paddock.sandbox.images.image import HealthCheck, Image, ImageConfig
from paddock.sandbox.images.importing import import_image
from paddock.sandbox.images.oci import digest_of, image_from_config, make_image
from paddock.sandbox.images.resolve import get_image
from paddock.sandbox.images.store import ImageStore


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def add_layer(store: ImageStore, content: str) -> str:
    staged = store.stage_layer()
    (staged / "file").write_text(content)
    if os.geteuid() == 0:
        os.chown(staged / "file", store.identity.host_uid(0) or 0, store.identity.host_gid(0) or 0)
    layer_id = digest_of(content.encode())
    store.commit_layer(staged, layer_id, disk_bytes=1000)
    return layer_id


def add_image(store: ImageStore, name: str, *contents: str) -> Image:
    image = make_image(name, tuple(add_layer(store, content) for content in contents), ImageConfig())
    store.save(image)
    return image


def test_an_image_is_found_by_every_spelling_of_its_name(store: ImageStore) -> None:
    image = add_image(store, "ubuntu:24.04", "a", "b")
    for name in ("ubuntu:24.04", "docker.io/ubuntu:24.04", "docker.io/library/ubuntu:24.04", image.digest):
        stored = store.find(name)
        assert stored is not None
        assert (stored.digest, stored.layers) == (image.digest, image.layers)
    assert store.find("ubuntu:22.04") is None
    assert [one.image.name for one in store.list_images()] == ["ubuntu:24.04"]
    assert store.remove("ubuntu:24.04")
    assert not store.remove("ubuntu:24.04")
    assert store.find("ubuntu:24.04") is None


def test_a_pinned_name_is_the_stored_image_of_that_digest(store: ImageStore) -> None:
    image = add_image(store, "ubuntu:24.04", "a")
    stored = store.find(f"ubuntu:24.04@{image.digest}")
    assert stored is not None
    assert stored.layers == image.layers
    assert store.find(f"ubuntu@{digest_of(b'other')}") is None


def test_a_config_survives_the_store(store: ImageStore) -> None:
    config = ImageConfig(
        env={"A": "1=2", "EMPTY": ""},
        user="app:app",
        cmd=("sh",),
        entrypoint=("/init",),
        shell=("/bin/bash", "-c"),
        labels={"a": "b"},
        exposed_ports=("80/tcp",),
        volumes=("/data",),
        health_check=HealthCheck(("curl", "x"), interval=1.5),
    )
    image = make_image("x", (add_layer(store, "a"),), config)
    store.save(image)
    assert store.find("x") == image


def test_a_foreign_config_is_read() -> None:
    text = b"""{"architecture": "arm64", "os": "linux", "variant": "v8", "rootfs": {"type": "layers", "diff_ids": []},
        "config": {"Env": null, "WorkingDir": "app", "Cmd": "echo hi",
        "Healthcheck": {"Test": ["CMD-SHELL", "x"]}}}"""
    image = image_from_config("x", text)
    assert image.platform == "linux/arm64/v8"
    assert str(image.config.workdir) == "/app"
    assert image.config.cmd == ("/bin/sh", "-c", "echo hi")
    assert image.config.health_check == HealthCheck(("/bin/sh", "-c", "x"))
    with pytest.raises(ImageError, match=r"rootfs.diff_ids"):
        image_from_config("x", b'{"rootfs": {"diff_ids": ["../../x"]}}')
    with pytest.raises(ImageError, match="Env"):
        image_from_config("x", b'{"rootfs": {"diff_ids": []}, "config": {"Env": 3}}')


def test_an_existing_layer_wins(store: ImageStore) -> None:
    layer_id = add_layer(store, "same")
    staged = store.stage_layer()
    (staged / "other").write_text("other")
    (staged.parent / "work").mkdir()
    path = store.commit_layer(staged, layer_id)
    assert os.listdir(path) == ["file"]
    assert not staged.parent.exists()


def test_prune_keeps_what_is_held_or_imported(store: ImageStore) -> None:
    old, held = add_image(store, "old", "base", "old"), add_image(store, "held", "base", "held")
    imported = make_image("imported", (add_layer(store, "imported"),), ImageConfig())
    store.save(imported, source="import")
    add_layer(store, "of no image")
    with ImageStore(store.folder).hold(held) as layers:
        result = store.prune(0)
        assert result.images == ("old:latest",)
        assert [(layer / "file").read_text() for layer in layers] == ["base", "held"]
    assert store.find("imported") == imported
    assert store.find("held") == held
    with pytest.raises(ImageError, match="not on this machine"), store.hold(old):
        pass
    assert store.prune(0).images == ("held:latest",)
    assert store.disk_bytes == 1000


def test_the_least_recently_used_image_goes_first(store: ImageStore) -> None:
    images = [add_image(store, name, name) for name in ("a", "b", "c")]
    for age, image in zip((10, 1000, 500), images, strict=True):
        path = store._record_path(image.name)
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert store.prune(2000).images == ("b:latest",)


HOLD = """
import sys
from pathlib import Path
from paddock.sandbox.images.store import ImageStore
store = ImageStore(Path(sys.argv[1]))
with store.hold(store.find("x")):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_process_can_hold_an_image(store: ImageStore) -> None:
    add_image(store, "x", "a")
    command = [sys.executable, "-c", HOLD, str(store.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert store.prune(0).images == ()
        process.communicate(timeout=10)
    assert store.prune(0).images == ("x:latest",)


def test_leftovers_of_a_dead_process_are_removed(store: ImageStore) -> None:
    staged = store.stage_layer()
    store.prune()
    assert staged.exists()
    store._end_staging(staged.parent)
    store.prune()
    assert not staged.exists()


def test_the_next_process_removes_what_a_killed_one_left(store: ImageStore) -> None:
    old, new, used = (store.stage_layer() for _ in range(3))
    for staged in (old, new):
        store._end_staging(staged.parent)
    for staged in (old, used):
        os.utime(staged.parent, (0, 0))
    ImageStore(store.folder).stage_layer()
    assert [staged.exists() for staged in (old, new, used)] == [False, True, True]


def test_old_downloads_are_removed(store: ImageStore) -> None:
    for name in ("old.part", "new.part"):
        (store.blobs_folder / name).touch()
    os.utime(store.blobs_folder / "old.part", (0, 0))
    store.prune()
    assert [path.name for path in store.blobs_folder.iterdir()] == ["new.part"]


def test_many_layers_are_merged(store: ImageStore) -> None:
    image = add_image(store, "x", *(str(number) for number in range(100)))
    for _ in range(2):
        with store.hold(image) as layers:
            assert len(layers) <= 60
            assert sum(len(os.fsencode(layer)) + 1 for layer in layers) < 4000
            assert (layers[0] / "file").read_text() == str(100 - len(layers))
            assert (layers[-1] / "file").read_text() == "99"
    store.prune()
    with store.hold(image):
        pass


def test_a_root_archive_and_a_root_folder_are_imported(store: ImageStore, tmp_path: Path) -> None:
    archive = tmp_path / "root.tar"
    members = (folder("etc", mode=0o700), Member("etc/x", b"1", uid=33, gid=44, mode=0o4755), symlink("l", "/etc/x"))
    archive.write_bytes(make_tar(*members))
    image = asyncio.run(import_image(archive, "a", store=store))
    assert asyncio.run(get_image("a", store=store)) == image
    with store.hold(image) as (layer,):
        owner = layer.stat()
        assert owner.st_uid == store.identity.host_uid(0)
        if os.geteuid() == 0:
            status = (layer / "etc/x").stat()
            assert (status.st_uid, status.st_gid) == (store.identity.host_uid(33), store.identity.host_gid(44))
            assert status.st_mode & 0o7777 == 0o4755
    source = tmp_path / "root"
    (source / "bin").mkdir(parents=True)
    (source / "bin/sh").write_text("#!")
    with store.hold(asyncio.run(import_image(source, "b", store=store))) as (layer,):
        assert (layer / "bin/sh").read_text() == "#!"
    store.remove("a")
    assert store.prune().layers == 1


def test_bad_sources_are_refused(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello" * 1000)
    for source, name in ((tmp_path / "absent", "x"), (tmp_path / "text", "x"), (tmp_path, "Bad Name")):
        with pytest.raises(ImageError) as caught:
            asyncio.run(import_image(source, name, store=store))
        assert caught.value.hint
    with pytest.raises(ImageError, match="not on this machine"):
        asyncio.run(get_image("x", pull=False, store=store))
    assert list(store._staging_folder.iterdir()) == []
