"""Saved images: imported, exported, and refused if they are damaged."""

import asyncio
import gzip
import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard
from tests.sandbox.images.archives import Member, folder, make_tar, symlink

from paddock.errors import ImageError
from paddock.sandbox.images.exporting import export_image
from paddock.sandbox.images.image import ImageConfig
from paddock.sandbox.images.importing import import_image
from paddock.sandbox.images.oci import config_to_json, digest_of, make_image
from paddock.sandbox.images.store import ImageStore

LAYERS = (make_tar(folder("a"), Member("a/x", b"1", uid=7)), make_tar(folder("a"), Member("a/.wh.x")))
CONFIG = ImageConfig(env={"A": "1"}, cmd=("sh",))


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def hexdigest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def config_blob() -> bytes:
    return config_to_json(tuple(digest_of(layer) for layer in LAYERS), CONFIG, "linux/amd64")


def oci_files(compress: Any = gzip.compress) -> dict[str, bytes]:
    files: dict[str, bytes] = {}

    def put(content: bytes) -> dict[str, Any]:
        files[f"blobs/sha256/{hexdigest(content)}"] = content
        return {"mediaType": "x", "digest": digest_of(content), "size": len(content)}

    layers = [put(compress(layer)) for layer in LAYERS]
    manifest = put(json.dumps({"config": put(config_blob()), "layers": layers}).encode())
    other = {**put(b"{}"), "platform": {"os": "linux", "architecture": "s390x"}}
    platform = {"platform": {"os": "linux", "architecture": "amd64"}}
    inner = put(json.dumps({"manifests": [other, {**manifest, **platform}]}).encode())
    return {**files, "oci-layout": b"{}", "index.json": json.dumps({"manifests": [inner]}).encode()}


def docker_files() -> dict[str, bytes]:
    names = [f"{hexdigest(layer)}/layer.tar" for layer in LAYERS]
    manifest = [{"Config": f"{hexdigest(config_blob())}.json", "RepoTags": ["me:1"], "Layers": names}]
    files = {f"{hexdigest(config_blob())}.json": config_blob(), **dict(zip(names, LAYERS, strict=True))}
    return {**files, "manifest.json": json.dumps(manifest).encode(), "repositories": b"{}"}


def to_tar(files: dict[str, bytes]) -> bytes:
    return make_tar(*(Member(name, content) for name, content in files.items()))


def write_folder(files: dict[str, bytes], target: Path) -> None:
    for name, content in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress], ids=["tar", "gzip", "zstd"])
@pytest.mark.parametrize("make", [oci_files, docker_files])
def test_saved_images_are_imported(store: ImageStore, tmp_path: Path, make: Any, compress: Any) -> None:
    source = tmp_path / "saved"
    source.write_bytes(compress(to_tar(make())))
    image = asyncio.run(import_image(source, "x:2", store=store))
    assert image == make_image("x:2", tuple(digest_of(layer) for layer in LAYERS), CONFIG, "linux/amd64")
    with store.hold(image) as (lower, upper):
        assert (lower / "a/x").read_bytes() == b"1"
        assert (upper / "a/x").is_char_device()
    assert list(store.blobs_folder.iterdir()) == []


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress], ids=["tar", "gzip", "zstd"])
def test_an_oci_layout_is_a_folder_too(store: ImageStore, tmp_path: Path, compress: Any) -> None:
    write_folder(oci_files(compress), tmp_path / "layout")
    assert asyncio.run(import_image(tmp_path / "layout", "x", store=store)).config == CONFIG


@pytest.mark.parametrize("names", [("org/me:1", "org/me:2"), ("1", "2")], ids=["full names", "tags"])
def test_a_layout_of_several_images_is_read_by_name(store: ImageStore, tmp_path: Path, names: Any) -> None:
    files = oci_files()
    (inner,) = json.loads(files["index.json"])["manifests"]
    entries = [
        {**inner, "annotations": {"org.opencontainers.image.ref.name": names[0]}},
        {**inner, "digest": digest_of(b"other"), "annotations": {"org.opencontainers.image.ref.name": names[1]}},
    ]
    write_folder({**files, "index.json": json.dumps({"manifests": entries[::-1]}).encode()}, tmp_path / "layout")
    assert asyncio.run(import_image(tmp_path / "layout", "org/me:1", store=store)).config == CONFIG
    with pytest.raises(ImageError, match="has 2 images, and none is called x:3") as caught:
        asyncio.run(import_image(tmp_path / "layout", "x:3", store=store))
    assert names[0] in str(caught.value.hint)


def replaced(old: bytes, new: bytes) -> dict[str, bytes]:
    return {name: content.replace(old, new) for name, content in docker_files().items()}


DAMAGED = {
    "other layer": replaced(LAYERS[0], make_tar(folder("b"))),
    "no layer": {name: content for name, content in docker_files().items() if not name.endswith("layer.tar")},
    "cut layer": {name: content[:700] if "layer" in name else content for name, content in docker_files().items()},
    "layer outside": replaced(hexdigest(LAYERS[0]).encode() + b"/layer.tar", b"../../../etc/hostname"),
    "bad manifest": {**docker_files(), "manifest.json": b"[{]"},
    "nested manifest": {**docker_files(), "manifest.json": b"[" * 100_000},
    "number as manifest": {**docker_files(), "manifest.json": b"3"},
    "other blob": {name: content + b" " if "blobs" in name else content for name, content in oci_files().items()},
    "bad index": {**oci_files(), "index.json": b"[]"},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_image_is_refused(store: ImageStore, tmp_path: Path, name: str) -> None:
    (tmp_path / "saved").write_bytes(to_tar(DAMAGED[name]))
    with pytest.raises(ImageError) as caught:
        asyncio.run(import_image(tmp_path / "saved", "x", store=store))
    assert caught.value.hint
    assert store.list_images() == []


@pytest.mark.parametrize("target", ["manifest.json", "/etc/hostname", "other"])
def test_a_link_leads_nowhere_else(store: ImageStore, tmp_path: Path, target: str) -> None:
    links = make_tar(symlink("manifest.json", target), symlink("other", "manifest.json"), Member("oci-layout"))
    (tmp_path / "saved").write_bytes(links)
    with pytest.raises(ImageError, match=r"has no 'index\.json'"):
        asyncio.run(import_image(tmp_path / "saved", "x", store=store))


def test_a_repeated_layer_may_be_a_link(store: ImageStore, tmp_path: Path) -> None:
    files = docker_files()
    members = [Member(name, content) for name, content in files.items() if not name.endswith("layer.tar")]
    folders = [name.removesuffix("/layer.tar") for name in files if name.endswith("layer.tar")]
    members += [Member(f"{'0' * 64}/{name}", files[f"{name}/layer.tar"]) for name in folders]
    members += [symlink(f"{name}/layer.tar", f"../{'0' * 64}/{name}") for name in folders]
    (tmp_path / "saved").write_bytes(make_tar(*members))
    assert asyncio.run(import_image(tmp_path / "saved", "x", store=store)).config == CONFIG


def test_an_exported_image_is_imported_again(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "saved").write_bytes(to_tar(docker_files()))
    image = asyncio.run(import_image(tmp_path / "saved", "x:1", store=store))
    asyncio.run(export_image(image, tmp_path / "out.tar", store=store))
    other = ImageStore(tmp_path / "other")
    again = asyncio.run(import_image(tmp_path / "out.tar", "x:1", store=other))
    assert again.config == image.config
    with other.hold(again) as (lower, upper):
        assert (lower / "a/x").read_bytes() == b"1"
        assert (upper / "a/x").is_char_device()
    with tarfile.open(tmp_path / "out.tar") as archive:
        names = archive.getnames()
    assert {"oci-layout", "index.json", "manifest.json"} <= set(names)
