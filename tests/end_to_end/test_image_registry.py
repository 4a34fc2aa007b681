"""`paddock image` with Debian's registry and skopeo: what one writes, the others read."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.processes import paddock
from tests.end_to_end.registries import copy_image, missing_programs, registry_running
from tests.sandbox.images.archives import Member, folder, hard_link, make_tar, symlink

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.skipif(bool(missing_programs()), reason=missing_programs() or "nothing is missing"),
]

ROOT = make_tar(
    folder("etc"),
    Member("etc/owned", b"1", uid=33, gid=44, mode=0o640),
    Member("bin/su", b"#!", mode=0o4755),
    hard_link("bin/sudo", "bin/su"),
    symlink("sbin", "bin"),
    Member("noise", os.urandom(3_000_000)),
)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry_running(tmp_path_factory.mktemp("registry")) as host:
        yield host


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image that we import and export, as `docker load` and skopeo read it."""
    place = tmp_path_factory.mktemp("archive")
    (place / "root.tar").write_bytes(ROOT)
    settings = {"PADDOCK_IMAGES": str(place / "images")}
    options = ("--workdir", "/app", "--env", "A=b c", "--cmd", "echo hi")
    done = paddock("image", "import", str(place / "root.tar"), "me/app:1", *options, **settings)
    assert done.returncode == 0, done.stderr
    done = paddock("image", "export", "me/app:1", str(place / "app.tar"), **settings)
    assert done.returncode == 0, done.stderr
    return place / "app.tar"


FORMS = {
    "docker": ("--format", "v2s2"),
    "oci": ("--format", "oci"),
    "zstd": ("--format", "oci", "--dest-compress-format", "zstd"),
    "uncompressed": ("--dest-decompress",),
}


@pytest.mark.parametrize(
    ("transport", "form"),
    [
        ("docker-archive", "docker"),
        ("oci-archive", "oci"),
        ("docker-archive", "zstd"),
        ("oci-archive", "uncompressed"),
    ],
)
def test_an_image_survives_export_push_pull_and_export(
    registry: str, archive: Path, tmp_path: Path, transport: str, form: str
) -> None:
    name = f"{registry}/{transport}/{form}:1"
    if form == "uncompressed":
        # skopeo decompresses only into folders.
        copy_image(f"{transport}:{archive}", f"dir:{tmp_path / 'plain'}", *FORMS[form])
        copy_image(f"dir:{tmp_path / 'plain'}", f"docker://{name}")
    else:
        copy_image(f"{transport}:{archive}", f"docker://{name}", *FORMS[form])
    settings = {"PADDOCK_IMAGES": str(tmp_path / "images")}
    pulled = paddock("image", "pull", name, "--json", **settings)
    assert pulled.returncode == 0, pulled.stderr
    stored = json.loads(paddock("image", "ls", "--json", **settings).stdout)
    assert (stored["name"], stored["digest"], stored["source"]) == (
        name,
        json.loads(pulled.stdout)["digest"],
        "registry",
    )
    exported = paddock("image", "export", name, str(tmp_path / "again.tar"), **settings)
    assert exported.returncode == 0, exported.stderr
    copy_image(f"docker-archive:{tmp_path / 'again.tar'}", f"oci:{tmp_path / 'layout'}:1")
    imported = paddock("image", "import", str(tmp_path / "layout"), "again:1", "--json", **settings)
    assert imported.returncode == 0, imported.stderr
    assert json.loads(imported.stdout)["layers"] == json.loads(pulled.stdout)["layers"]


def test_a_mirror_answers_for_a_name(registry: str, archive: Path, tmp_path: Path) -> None:
    copy_image(f"docker-archive:{archive}", f"docker://{registry}/library/thing:7")
    settings = {"PADDOCK_IMAGES": str(tmp_path), "PADDOCK_IMAGE_MIRRORS": f"docker.io=http://{registry}"}
    done = paddock("image", "pull", "thing:7", **settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("thing:7 sha256:")


def test_an_absent_image_is_named(registry: str, tmp_path: Path) -> None:
    done = paddock("image", "pull", f"{registry}/absent:1", PADDOCK_IMAGES=str(tmp_path))
    assert done.returncode == 2
    assert "absent" in done.stderr
    assert "404" in done.stderr
    assert "hint: check the name" in done.stderr


def test_a_damaged_registry_is_noticed(archive: Path, tmp_path: Path) -> None:
    with registry_running(tmp_path / "registry") as host:
        copy_image(f"docker-archive:{archive}", f"docker://{host}/app:1")
        blobs = [path for path in (tmp_path / "registry/data").rglob("data") if path.stat().st_size > 1_000_000]
        (blob,) = blobs
        content = bytearray(blob.read_bytes())
        content[1_000_000] ^= 1
        blob.write_bytes(content)
        done = paddock("image", "pull", f"{host}/app:1", PADDOCK_IMAGES=str(tmp_path / "images"))
    assert done.returncode == 2
    assert "instead of sha256:" in done.stderr
