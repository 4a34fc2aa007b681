"""A small container runtime on a unix socket: Docker's wire, and bubblewrap instead of containers.

It answers as the real one does where our backend relies on it: versions, chunked answers, errors as JSON, a
hijacked connection with framed outputs, containers that are removed when they end, volumes, archives, and images
that can be loaded, built and opened.
"""

import asyncio
import io
import json
import re
import secrets
import struct
import tarfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, urlsplit

from paddock.limits import SandboxLimits
from paddock.sandbox.base import Mount, SandboxSpec
from paddock.sandbox.bundle import remote_program
from paddock.sandbox.bwrap import BwrapSandbox
from paddock.sandbox.connection import GuestConnection
from paddock.sandbox.guest.usage import disk_use
from paddock.sandbox.images.image import Image
from paddock.sandbox.images.store import default_store
from paddock.sandbox.nested_guest import start_nested_guest
from sandbox import fake_runtime_images

BIG = asdict(SandboxLimits(memory_bytes=1 << 40, cpu_seconds=1e9, processes=1 << 20, disk_bytes=1 << 40))


class Container:
    """One that was created. It lives from its start to its end."""

    def __init__(self, runtime: "FakeContainerRuntime", body: dict[str, Any]) -> None:
        self.runtime, self.body = runtime, body
        self.id = secrets.token_hex(32)
        self.attached: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.outer: BwrapSandbox | None = None
        self.connection: GuestConnection | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.image: Image | None = runtime.find_image(body["Image"])
        self.layer: Path | None = None if self.image is None else default_store().stage_layer()
        """What is written to its root, if it has an image."""

    async def start(self) -> None:
        host = self.body["HostConfig"]
        tmpfs = host.get("Tmpfs") or {}
        sizes = [int(match[1]) for text in tmpfs.values() if (match := re.search(r"size=(\d+)", text))]
        limits = SandboxLimits(
            memory_bytes=host["Memory"],
            processes=host["PidsLimit"] + 2,
            disk_bytes=sum(sizes) + host["ShmSize"] if self.image is None else 1 << 33,
        )
        mounts = tuple(Mount(self.source(mount), PurePosixPath(mount["Target"])) for mount in host["Mounts"])
        spec = SandboxSpec(limits, mounts=mounts, image=self.image, writable_layer=self.layer)
        opened: Any = BwrapSandbox.class_for(spec)(f"sb-fake-{secrets.token_hex(4)}", spec)
        self.outer = opened
        assert self.outer is not None
        await self.outer.open(20)
        transport = await start_nested_guest(self.outer, remote_program(), timeout=20)
        connection = self.connection = GuestConnection(transport, self)
        home = str(self.outer.home)
        await connection.ask("begin", {"home": home, "folders": [home], "logs": "/logs", "limits": BIG})
        stdin = connection.new_number()
        command = {
            "argv": [*self.body["Entrypoint"], *self.body["Cmd"]],
            "cwd": self.body["WorkingDir"],
            "env": self.environment(),
            "streams": [stdin, self.collect(1), self.collect(2)],
        }
        await connection.ask("spawn", command)
        self.tasks.append(asyncio.ensure_future(self.feed(stdin)))

    def environment(self) -> dict[str, str]:
        image_env = {} if self.image is None else self.image.config.env
        return {**image_env, **dict(text.split("=", 1) for text in self.body["Env"])}

    def source(self, mount: dict[str, Any]) -> Path:
        return Path(mount["Source"]) if mount["Type"] == "bind" else self.runtime.volumes[mount["Source"]][0]

    def collect(self, kind: int) -> int:
        def take(data: bytes) -> None:
            if data and self.attached is not None and self.connection is not None:
                self.attached[1].write(struct.pack(">BxxxI", kind, len(data)) + data)
                self.connection.grant(number, len(data))

        assert self.connection is not None
        number = self.connection.collect(take).number
        return number

    async def feed(self, stdin: int) -> None:
        assert self.attached is not None
        assert self.connection is not None
        with suppress(Exception):
            while data := await self.attached[0].read(65536):
                await self.connection.write(stdin, data)
            await self.connection.write(stdin, b"", end=True)

    def handle_event(self, event: list[Any]) -> None:
        if event[0] == "exit" and self.body["HostConfig"]["AutoRemove"]:
            self.runtime.later(self.runtime.remove(self))

    def handle_late_result(self, name: str, result: Any) -> None:
        """No request is cancelled here."""

    def handle_end(self) -> None:
        """The sandbox around it is gone."""

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        if self.connection is not None:
            await self.connection.close()
        if self.outer is not None:
            await self.outer.close()
        if self.layer is not None:
            default_store().discard_layer(self.layer)
        if self.attached is not None:
            self.attached[1].close()


class FakeContainerRuntime:
    """Use it as an async context manager. `requests` are all that came, `images` those that are there."""

    def __init__(
        self,
        folder: Path,
        *,
        version: str = "1.51",
        images: tuple[str, ...] = ("python:3.13-slim",),
        limits_layers: bool = False,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self.path = folder / "docker.sock"
        self.folder, self.version = folder, version
        self.images: dict[str, Image | None] = dict.fromkeys(images)
        """By name. None: an image that is only named."""
        self.limits_layers, self.warnings = limits_layers, warnings
        self.builds: list[dict[str, str]] = []
        """The queries of builds."""
        self.containers: dict[str, Container] = {}
        self.volumes: dict[str, tuple[Path, dict[str, str]]] = {}
        self.requests: list[tuple[str, str]] = []
        self._later: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "FakeContainerRuntime":
        self._server = await asyncio.start_unix_server(self.serve, str(self.path), limit=1 << 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for container in list(self.containers.values()):
            await self.remove(container)
        # What is being removed is removed to its end.
        await asyncio.gather(*self._later, return_exceptions=True)
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

    def find_image(self, name: str) -> Image | None:
        """By name or digest."""
        by_digest = (image for image in self.images.values() if image is not None and image.digest == name)
        return self.images.get(self.stored_name(name)) or next(by_digest, None)

    def stored_name(self, name: str) -> str:
        """A name without a tag means the tag `latest`."""
        return name if name in self.images or ":" in name else f"{name}:latest"

    def later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def remove(self, container: Container) -> None:
        self.containers.pop(container.id, None)
        await container.stop()

    # -- the wire -----------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self._writers.append(writer)
        try:
            while await self.answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
        finally:
            self._open.discard(task)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request. False if the connection is now something else."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *rest = head.split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)}
        body = await read_body(reader, headers)
        parts = urlsplit(target)
        self.requests.append((method, parts.path))
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path == "/_ping":
            self.reply(writer, 200, b"OK", kind="text/plain")
            return True
        match = re.fullmatch(r"/v([\d.]+)(/.*)", parts.path)
        if match is None or tuple(map(int, match[1].split("."))) > tuple(map(int, self.version.split("."))):
            self.tell(writer, 400, "client version is too new")
            return True
        segments = match[2].strip("/").split("/")
        if segments[0] == "containers" and segments[-1] == "attach":
            return self.attach(reader, writer, segments[1], headers)
        status, answer = await self.do(method, segments, query, body)
        if isinstance(answer, list) and status == 200 and segments[-1] in ("create", "load", "build"):
            self.stream(writer, answer)
        else:
            content = b"" if answer is None else json.dumps(answer).encode()
            self.reply(writer, status, content, kind="application/json")
        await writer.drain()
        return True

    def reply(self, writer: asyncio.StreamWriter, status: int, content: bytes, *, kind: str) -> None:
        engine = f"Api-Version: {self.version}\r\nServer: Fake/1\r\nBuilder-Version: 2\r\n"
        head = f"HTTP/1.1 {status} Whatever\r\n{engine}"
        body = "" if status == 204 else f"Content-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
        writer.write(f"{head}{body}\r\n".encode() + content)

    def tell(self, writer: asyncio.StreamWriter, status: int, message: str) -> None:
        self.reply(writer, status, json.dumps({"message": message}).encode(), kind="application/json")

    def stream(self, writer: asyncio.StreamWriter, messages: list[dict[str, Any]]) -> None:
        """The progress of a pull: one JSON object after the other, in chunks that do not keep to them."""
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        text = b"".join(json.dumps(message).encode() + b"\r\n" for message in messages)
        for start in range(0, len(text), 7):
            chunk = text[start : start + 7]
            writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        writer.write(b"0\r\n\r\n")

    def attach(self, reader: Any, writer: asyncio.StreamWriter, name: str, headers: dict[str, str]) -> bool:
        container = self.containers.get(name)
        if container is None:
            self.tell(writer, 404, f"No such container: {name}")
            return True
        assert headers["upgrade"] == "tcp"
        kind = "application/vnd.docker.raw-stream"
        writer.write(f"HTTP/1.1 101 UPGRADED\r\nContent-Type: {kind}\r\nUpgrade: tcp\r\n\r\n".encode())
        container.attached = (reader, writer)
        return False

    # -- what it can do -----------------------------------------------------------------------------

    async def do(self, method: str, segments: list[str], query: dict[str, str], body: bytes) -> tuple[int, Any]:
        match method, *segments:
            case "GET", "images", *name, "json":
                image = self.stored_name("/".join(name))
                if image not in self.images:
                    return 404, {"message": f"No such image: {image}"}
                return 200, fake_runtime_images.describe_image(self.images[image])
            case "POST", "images", "create":
                return self.pull(f"{query['fromImage']}:{query['tag']}")
            case "POST", "images", "load":
                return 200, await fake_runtime_images.load(self.images, body)
            case "POST", "build":
                self.builds.append(query)
                return 200, await fake_runtime_images.build(self.images, query, body)
            case "POST", "containers", "create":
                described = json.loads(body)
                if described["HostConfig"].get("StorageOpt") and not self.limits_layers:
                    reason = "--storage-opt is supported only for overlay over xfs with 'pquota' mount option"
                    return 500, {"message": reason}
                container = Container(self, described)
                self.containers[container.id] = container
                return 201, {"Id": container.id, "Warnings": list(self.warnings)}
            case "GET", "containers", "json":
                wanted = json.loads(query["filters"])["label"][0]
                return 200, [{"Id": one.id} for one in self.containers.values() if marked(one.body["Labels"], wanted)]
            case "POST", "volumes", "create":
                volume = json.loads(body)
                place = self.folder / "volumes" / volume["Name"]
                place.mkdir(parents=True)
                self.volumes[volume["Name"]] = (place, volume["Labels"])
                return 201, {"Name": volume["Name"]}
            case "GET", "volumes":
                wanted = json.loads(query["filters"])["label"][0]
                names = [name for name, (_, labels) in self.volumes.items() if marked(labels, wanted)]
                return 200, {"Volumes": [{"Name": name} for name in names]}
            case "DELETE", "volumes", name:
                return (204, None) if self.volumes.pop(name, None) else (404, {"message": "no such volume"})
        return await self.do_to_container(method, segments, query, body)

    async def do_to_container(
        self, method: str, segments: list[str], query: dict[str, str], body: bytes
    ) -> tuple[int, Any]:
        container = self.containers.get(segments[1] if len(segments) > 1 else "")
        if segments[0] != "containers" or container is None:
            return 404, {"message": f"No such container: {'/'.join(segments)}"}
        match method, *segments[2:]:
            case "POST", "start":
                if container.body["Image"] == "no-python:1":
                    return 400, {"message": 'exec: "python3": executable file not found in $PATH'}
                await container.start()
                return 204, None
            case "GET", "json" if container.layer is not None:
                return 200, {"Id": container.id, "SizeRw": disk_use(str(container.layer))}
            case "PUT", "archive" if container.layer is not None:
                fake_runtime_images.put_archive(container.layer / query["path"].lstrip("/"), body)
                return 200, None
            case "PUT", "archive":
                mount = container.body["HostConfig"]["Mounts"][0]
                assert mount["Target"] == query["path"]
                with tarfile.open(fileobj=io.BytesIO(body)) as archive:
                    archive.extractall(container.source(mount), filter="tar")
                return 200, None
            case "DELETE", *_:
                await self.remove(container)
                return 204, None
        return 404, {"message": "page not found"}

    def pull(self, image: str) -> tuple[int, Any]:
        if image.startswith("private/"):
            return 404, {"message": f"pull access denied for {image}"}
        if image.startswith("broken:"):
            return 200, [
                {"status": "Pulling"},
                {"error": "unexpected EOF", "errorDetail": {"message": "unexpected EOF"}},
            ]
        self.images[image] = None
        return 200, [
            {"status": "Pulling"},
            {"status": "Downloading", "progressDetail": {"current": 1}},
            {"status": "Done"},
        ]


async def read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    body = b""
    while size := int((await reader.readline()).strip(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


def marked(labels: dict[str, str], wanted: str) -> bool:
    name, _, value = wanted.partition("=")
    return labels.get(name) == value
