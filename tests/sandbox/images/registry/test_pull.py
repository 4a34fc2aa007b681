"""Pulling: what is fetched, from where, with which login, and what happens when it breaks."""

import asyncio
import gzip
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zstandard
from tests.sandbox.images.archives import Member, folder, make_tar
from tests.sandbox.images.registry.server import IDENTITY_TOKEN, PASSWORD, USER, Fault, Registry, serving

from paddock.errors import ImageError
from paddock.retry import Backoff
from paddock.sandbox.images.oci import this_platform
from paddock.sandbox.images.registry import blobs, pull
from paddock.sandbox.images.registry.pull import PullProgress, pull_image
from paddock.sandbox.images.resolve import check_runs_here, get_image
from paddock.sandbox.images.store import ImageStore

pytestmark = pytest.mark.anyio

LOWER = make_tar(folder("a"), Member("a/x", b"1"), Member("noise", os.urandom(200_000)))
UPPER = make_tar(folder("a"), Member("a/.wh.x"), Member("b", b"2"))


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    async with serving(Registry()) as server:
        server.add_image("me/app", LOWER, UPPER)
        yield server


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No logins of the user, and short pauses."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    (tmp_path / "docker").mkdir()
    for module, name in ((blobs, "BACKOFF"), (pull, "DOCUMENT_BACKOFF")):
        monkeypatch.setattr(module, name, Backoff(first_seconds=0.001, attempts=3))


def write_logins(tmp_path: Path, document: object) -> None:
    (tmp_path / "docker/config.json").write_text(json.dumps(document))


def layer_path(registry: Registry, layer: bytes = LOWER) -> str:
    content = gzip.compress(layer)
    return next(path for path, (blob, _) in registry.files.items() if len(blob) == len(content))


async def pull_app(registry: Registry, store: ImageStore, **settings: object) -> None:
    image = await pull_image(f"{registry.host}/me/app", store, **settings)  # type: ignore[arg-type]
    with store.hold(image) as (lower, upper):
        assert (lower / "a/x").read_bytes() == b"1"
        assert (upper / "a/x").is_char_device()
        assert (upper / "b").read_bytes() == b"2"
    assert list(store.blobs_folder.iterdir()) == []


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress], ids=["tar", "gzip", "zstd"])
async def test_an_image_is_pulled_once(
    registry: Registry, store: ImageStore, compress: Callable[[bytes], bytes]
) -> None:
    registry.add_image("me/app", LOWER, UPPER, compress=compress)
    progress = PullProgress()
    await pull_app(registry, store, progress=progress)
    assert (progress.finished_layers, progress.layers) == (2, 2)
    assert progress.received_bytes == progress.total_bytes == len(compress(LOWER)) + len(compress(UPPER))
    registry.requests.clear()
    await get_image(f"{registry.host}/me/app:latest", store=store)
    assert registry.requests == []
    await pull_app(registry, store)
    assert len(registry.seen("/blobs/")) == 1, "only the config"


async def test_the_platform_selects_from_an_index(registry: Registry, store: ImageStore) -> None:
    images = {
        name: registry.add_image("many", make_tar(Member(name.replace("/", "-"))), platform=name, tag="x")
        for name in ("linux/arm64/v8", "linux/amd64", "linux/arm/v7")
    }
    registry.add_index("many", {"unknown/unknown": images["linux/amd64"], **images})
    name = f"{registry.host}/many"
    for platform in ("linux/amd64", "linux/arm64", "linux/arm64/v8", "linux/arm/v7"):
        image = await pull_image(name, store, platform=platform)
        assert image.config.env["A"].startswith(platform)
        assert (await get_image(name, platform=platform, store=store)) == image
    with pytest.raises(ImageError, match="no image for linux/s390x") as caught:
        await pull_image(name, store, platform="linux/s390x")
    assert caught.value.hint == "it has linux/amd64, linux/arm/v7, linux/arm64/v8"


async def test_a_single_image_must_be_for_the_platform(registry: Registry, store: ImageStore) -> None:
    registry.add_image("one", LOWER, platform="linux/s390x")
    name = f"{registry.host}/one"
    with pytest.raises(ImageError, match=f"one is for linux/s390x, not for {this_platform()}") as caught:
        await get_image(name, store=store)
    assert "--platform linux/s390x" in str(caught.value.hint)
    image = await pull_image(name, store, platform="linux/s390x")
    with pytest.raises(ImageError, match="is for linux/s390x, not for"):
        check_runs_here(image)


async def test_a_digest_names_one_manifest(registry: Registry, store: ImageStore) -> None:
    digest = registry.add_image("me/app", LOWER, UPPER)["digest"]
    name = f"{registry.host}/me/app@{digest}"
    registry.faults[digest] = [Fault(replace=b"{}")]
    with pytest.raises(ImageError, match=f"instead of {digest}"):
        await pull_image(name, store)
    assert await get_image(name, store=store) == store.find(name)


# -- logins -------------------------------------------------------------------------------------------


AUTH = "YWRhOmNvcnJlY3QgaG9yc2U="
LOGINS: dict[str, dict[str, object]] = {
    "auth": {"auth": AUTH},
    "user and password": {"username": USER, "password": PASSWORD},
}


@pytest.mark.parametrize(
    ("key", "entry"),
    [("HOST", "auth"), ("HOST", "user and password"), ("http://HOST", "auth"), ("https://HOST/v2/", "auth")],
)
@pytest.mark.parametrize("login", ["basic", "bearer"])
async def test_a_login_is_used(
    registry: Registry, store: ImageStore, tmp_path: Path, login: str, key: str, entry: str
) -> None:
    registry.login, registry.is_public = login, False
    write_logins(tmp_path, {"auths": {key.replace("HOST", registry.host): LOGINS[entry]}})
    await pull_app(registry, store)


async def test_an_identity_token_is_exchanged(registry: Registry, store: ImageStore, tmp_path: Path) -> None:
    registry.login, registry.is_public = "bearer", False
    write_logins(tmp_path, {"auths": {registry.host: {"auth": AUTH, "identitytoken": IDENTITY_TOKEN}}})
    await pull_app(registry, store)


async def test_anonymous_tokens_are_fetched_once_and_renewed(registry: Registry, store: ImageStore) -> None:
    registry.login, registry.token_uses = "bearer", 2
    await pull_app(registry, store)
    assert len(registry.seen("/token")) == 2, "four requests, two for each token"
    assert all(not one.authorization for one in registry.seen("/token"))


HELPER = """#!{python}
import json, sys
server = sys.stdin.read().strip()
if sys.argv[1:] != ["get"] or server not in {servers!r}:
    sys.exit("credentials not found in native keychain")
print(json.dumps({{"ServerURL": server, "Username": {user!r}, "Secret": {secret!r}}}))
"""


@pytest.mark.parametrize("user", [USER, "<token>"])
@pytest.mark.parametrize("setting", ["credsStore", "credHelpers"])
async def test_a_credential_helper_is_asked(
    registry: Registry, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, user: str
) -> None:
    registry.login, registry.is_public = "bearer", False
    secret = PASSWORD if user == USER else IDENTITY_TOKEN
    program = tmp_path / "docker-credential-safe"
    program.write_text(HELPER.format(python=sys.executable, servers=[registry.host], user=user, secret=secret))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    write_logins(tmp_path, {setting: "safe" if setting == "credsStore" else {registry.host: "safe"}})
    await pull_app(registry, store)


@pytest.mark.parametrize("login", ["basic", "bearer"])
async def test_a_wrong_login_is_refused_without_showing_it(
    registry: Registry, store: ImageStore, tmp_path: Path, login: str
) -> None:
    registry.login, registry.is_public = login, False
    write_logins(tmp_path, {"auths": {registry.host: {"username": USER, "password": "hunter2"}}})
    with pytest.raises(ImageError, match="cannot be pulled") as caught:
        await pull_app(registry, store)
    assert "hunter2" not in f"{caught.value!r} {caught.value} {caught.value.hint}"
    assert "log in" in (caught.value.hint or "")
    assert len(registry.requests) < 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json cannot be read"),
        ('{"auths": {"HOST": {"auth": "%%%"}}}', "is not base64"),
        ('{"credsStore": "absent-helper"}', "docker-credential-absent-helper is not installed"),
        ('{"credsStore": "../../bin/sh"}', "is not installed"),
        ('{"credHelpers": ["x"]}', "credHelpers"),
        ('{"auths": 3}', "auths"),
    ],
)
async def test_broken_settings_are_named(
    registry: Registry, store: ImageStore, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "docker/config.json").write_text(text.replace("HOST", registry.host))
    with pytest.raises(ImageError, match=message) as caught:
        await pull_app(registry, store)
    assert caught.value.hint


async def test_netrc_does_not_replace_tokens(
    registry: Registry, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.login = "bearer"
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login someone password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    await pull_app(registry, store)


# -- redirects ----------------------------------------------------------------------------------------


async def test_another_host_does_not_get_the_token(registry: Registry, store: ImageStore) -> None:
    registry.login = "bearer"
    async with serving(Registry(files=registry.files)) as storage:
        registry.redirect_to = storage.url
        await pull_app(registry, store)
    assert len(storage.requests) == 3
    assert {one.authorization for one in storage.requests} == {""}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("http://192.0.2.1", "without TLS"),
        ("file:///etc", "without TLS"),
        ("SELF", "redirects more than"),
        ("http://127.0.0.1:1", "cannot be reached"),
    ],
)
async def test_a_bad_redirect_is_refused(registry: Registry, store: ImageStore, target: str, message: str) -> None:
    registry.redirect_to = target.replace("SELF", registry.url)
    with pytest.raises(ImageError, match=message) as caught:
        await pull_app(registry, store)
    assert caught.value.hint
    assert "signature" not in str(caught.value)


# -- broken downloads ---------------------------------------------------------------------------------


async def test_a_broken_download_continues_where_it_ended(registry: Registry, store: ImageStore) -> None:
    path = layer_path(registry)
    registry.faults[path] = [Fault(cut_after=50_000), Fault(status=503), Fault(cut_after=1), Fault(cut_after=90_000)]
    await pull_app(registry, store)
    starts = [one.range for one in registry.seen(path)]
    assert starts[0] == ""
    assert starts[-1] not in ("", "bytes=0-")
    assert len(starts) == 5


async def test_a_connection_that_breaks_often_needs_no_pauses(
    registry: Registry, store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "BACKOFF", Backoff(first_seconds=3600.0, longest_seconds=3600.0))
    monkeypatch.setattr(blobs, "CHUNK_BYTES", 10_000)
    path = layer_path(registry)
    registry.faults[path] = [Fault(cut_after=30_000) for _ in range(5)]
    await pull_app(registry, store, timeout=60.0)
    assert len(registry.seen(path)) == 6


async def test_the_next_command_continues_a_download(registry: Registry, store: ImageStore) -> None:
    path = layer_path(registry)
    registry.faults[path] = [Fault(cut_after=50_000), *[Fault(status=502)] * 5]
    with pytest.raises(ImageError, match="502"):
        await pull_app(registry, store)
    # The other layer may have been cancelled while it was unpacked. Then its download is there too.
    size = (store.blobs_folder / f"{path.rpartition(':')[2]}.part").stat().st_size
    assert 0 < size <= 50_000
    registry.faults.clear()
    registry.requests.clear()
    await pull_app(registry, store)
    assert [one.range for one in registry.seen(path)] == [f"bytes={size}-"]


async def test_a_server_may_ignore_the_range(registry: Registry, store: ImageStore) -> None:
    registry.ignores_range = True
    registry.faults[layer_path(registry)] = [Fault(cut_after=50_000)]
    progress = PullProgress()
    await pull_app(registry, store, progress=progress)
    assert progress.received_bytes == progress.total_bytes


@pytest.mark.parametrize(
    "change",
    [lambda blob: blob[:-1] + b"!", lambda blob: b"!" + blob[1:], lambda blob: blob + b"!"],
    ids=["last byte", "first byte", "longer"],
)
async def test_wrong_content_is_refused_and_not_kept(
    registry: Registry, store: ImageStore, change: Callable[[bytes], bytes]
) -> None:
    path = layer_path(registry)
    registry.faults[path] = [Fault(replace=change(registry.files[path][0]))]
    with pytest.raises(ImageError, match=r"sen[dt]") as caught:
        await pull_app(registry, store)
    assert caught.value.hint
    digest = path.rpartition(":")[2]
    assert not (store.blobs_folder / f"{digest}.part").exists()
    assert store.list_images() == []
    await pull_app(registry, store)


async def test_a_busy_registry_is_asked_again(registry: Registry, store: ImageStore) -> None:
    limited = Fault(status=429, headers=(("Retry-After", "0"),))
    registry.faults["/manifests/"] = [limited, Fault(status=500)]
    registry.faults["/blobs/"] = [limited]
    await pull_app(registry, store)


@pytest.mark.parametrize("status", [400, 403, 404, 418])
async def test_a_refusal_is_final(registry: Registry, store: ImageStore, status: int) -> None:
    registry.faults["/manifests/"] = [Fault(status=status)] * 3
    with pytest.raises(ImageError, match=f"HTTP {status}") as caught:
        await pull_app(registry, store)
    assert caught.value.hint
    assert len(registry.requests) == 1


async def test_a_pull_has_a_deadline(store: ImageStore) -> None:
    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ImageError, match="too slow"):
            await pull_image(f"127.0.0.1:{port}/x", store, timeout=0.3)


async def test_a_cancelled_pull_keeps_what_it_has(registry: Registry, store: ImageStore) -> None:
    progress = PullProgress()
    task = asyncio.create_task(pull_app(registry, store, progress=progress))
    progress.on_change = lambda one: task.cancel() if one.received_bytes else None
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.list_images() == []
    assert list(store._staging_folder.iterdir()) == []
    await pull_app(registry, store)


# -- mirrors ------------------------------------------------------------------------------------------


def use_mirror(monkeypatch: pytest.MonkeyPatch, registry: str, url: str) -> None:
    monkeypatch.setenv("PADDOCK_IMAGE_MIRRORS", f"{registry}={url}")


async def test_a_mirror_answers_for_its_registry(
    registry: Registry, store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.add_image("library/ubuntu", LOWER, UPPER, tag="24.04")
    registry.add_image("proxy/library/ubuntu", UPPER, tag="24.04")
    for url, layers in ((registry.url, 2), (f"{registry.url}/v2/", 2), (registry.host, 2)):
        use_mirror(monkeypatch, "docker.io", url)
        assert len((await pull_image("ubuntu:24.04", store)).layers) == layers
    assert (await get_image("docker.io/library/ubuntu:24.04", store=store)).layers


FAILURES = {
    "absent": lambda mirror: mirror.files.clear(),
    "unavailable": lambda mirror: mirror.faults["/v2/"].extend([Fault(status=503)] * 9),
    "without layers": lambda mirror: [mirror.files.pop(path) for path in list(mirror.files) if "/blobs/" in path],
    "wrong layer": lambda mirror: mirror.faults[layer_path(mirror)].append(Fault(replace=bytes(100))),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_the_registry_answers_if_the_mirror_does_not(
    registry: Registry, store: ImageStore, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    async with serving(Registry()) as mirror:
        mirror.add_image("me/app", LOWER, UPPER)
        FAILURES[failure](mirror)
        use_mirror(monkeypatch, registry.host, mirror.url)
        progress = PullProgress()
        await pull_app(registry, store, progress=progress)
        assert mirror.requests
    assert progress.received_bytes == progress.total_bytes


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://mirror.example.com", "without TLS"),
        ("ftp://mirror.example.com", "no http"),
        ("https://user:secret@mirror.example.com", "no http"),
    ],
)
async def test_a_bad_mirror_is_refused(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch, url: str, message: str
) -> None:
    use_mirror(monkeypatch, "docker.io", url)
    with pytest.raises(ImageError, match=message) as caught:
        await pull_image("ubuntu", store)
    assert "secret" not in str(caught.value)


# -- hostile registries -------------------------------------------------------------------------------


HOSTILE: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"<html>", "not JSON"),
    "a list": (b"[]", "not JSON"),
    "old manifest": (b'{"schemaVersion": 1, "fsLayers": []}', "schema 1"),
    "nested": (b"[" * 100_000, "not JSON"),
    "artifact": (b'{"mediaType": "application/vnd.oci.artifact.manifest.v1+json"}', "oci.artifact.manifest"),
    "digest with a path": (b'{"config": {"digest": "../../x", "size": 1}, "layers": []}', "config.digest"),
    "negative size": (
        b'{"config": {"digest": "sha256:%s", "size": -1}, "layers": []}' % (b"0" * 64),
        "config.size",
    ),
    "endless": (bytes(9 << 20), "more than"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_manifest_is_refused(registry: Registry, store: ImageStore, name: str) -> None:
    content, message = HOSTILE[name]
    registry.faults["/manifests/"] = [Fault(replace=content)]
    with pytest.raises(ImageError, match=message) as caught:
        await pull_app(registry, store)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("part", "kind", "message"),
    [
        ("config", "application/vnd.cncf.helm.config.v1+json", "no image: .*helm"),
        ("layers", "application/vnd.oci.image.layer.v1.tar+gzip+encrypted", "is encrypted"),
        ("layers", "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "not in the registry"),
        ("layers", "application/wasm", "unknown kind 'application/wasm'"),
    ],
)
async def test_an_unknown_kind_is_refused_by_name(
    registry: Registry, store: ImageStore, part: str, kind: str, message: str
) -> None:
    manifest = json.loads(registry.files["/v2/me/app/manifests/latest"][0])
    (manifest["config"] if part == "config" else manifest["layers"][0])["mediaType"] = kind
    registry.add_manifest("me/app", manifest, "latest")
    with pytest.raises(ImageError, match=message):
        await pull_app(registry, store)
    assert registry.seen("/blobs/") == []


async def test_a_layer_with_another_diff_id_is_refused(registry: Registry, store: ImageStore) -> None:
    path = layer_path(registry, UPPER)
    other = gzip.compress(make_tar(Member("evil")))
    manifest_path = "/v2/me/app/manifests/latest"
    manifest = json.loads(registry.files[manifest_path][0])
    manifest["layers"][1] = registry.add_blob("me/app", other)
    registry.add_manifest("me/app", manifest, "latest")
    with pytest.raises(ImageError, match="instead of"):
        await pull_app(registry, store)
    assert store.list_images() == []
    assert path in registry.files


# -- several at once ----------------------------------------------------------------------------------


PULL = """
import asyncio, sys
from pathlib import Path
from paddock.sandbox.images.registry.pull import pull_image
from paddock.sandbox.images.store import ImageStore
print(asyncio.run(pull_image(sys.argv[2], ImageStore(Path(sys.argv[1])))).digest)
"""


async def test_two_processes_download_each_layer_once(registry: Registry, store: ImageStore) -> None:
    words = [sys.executable, "-c", PULL, str(store.folder), f"{registry.host}/me/app"]
    processes = [await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE) for _ in range(2)]
    outputs = [(await process.communicate())[0].decode().strip() for process in processes]
    image = store.find(f"{registry.host}/me/app")
    assert image is not None
    assert outputs == [image.digest] * 2
    assert len(registry.seen(layer_path(registry))) == 1
    assert list(store.blobs_folder.iterdir()) == []
    assert list(store._staging_folder.iterdir()) == []
