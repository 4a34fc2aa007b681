"""A small container engine on a unix socket: Docker's wire, and bubblewrap instead of containers.

It answers as the real one does where our backend relies on it: versions, chunked answers, errors as JSON, a
hijacked connection with framed outputs, containers that are removed when they end, volumes and archives.
"""

import asyncio
import io
import json
import re
import secrets
import struct
import tarfile
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, urlsplit

from paddock.rollouts.limits import SandboxLimits
from paddock.rollouts.sandbox.base import Mount, SandboxSpec
from paddock.rollouts.sandbox.bundle import program
from paddock.rollouts.sandbox.bwrap import BwrapSandbox
from paddock.rollouts.sandbox.channel import Channel
from paddock.rollouts.sandbox.inside import call_from

BIG = {"memory_bytes": 1 << 40, "cpu_seconds": 1e9, "processes": 1 << 20, "disk_bytes": 1 << 40, "cpus": None}


class Container:
    """One that was created. It lives from its start to its end."""

    def __init__(self, engine: "FakeEngine", body: dict[str, Any]) -> None:
        self.engine, self.body = engine, body
        self.id = secrets.token_hex(32)
        self.attached: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.outer: BwrapSandbox | None = None
        self.channel: Channel | None = None
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        host = self.body["HostConfig"]
        sizes = [int(found[1]) for text in host["Tmpfs"].values() if (found := re.search(r"size=(\d+)", text))]
        limits = SandboxLimits(
            memory_bytes=host["Memory"],
            processes=host["PidsLimit"] + 2,
            disk_bytes=sum(sizes) + host["ShmSize"],
        )
        mounts = tuple(Mount(self.source(mount), PurePosixPath(mount["Target"])) for mount in host["Mounts"])
        self.outer = BwrapSandbox(f"sb-fake-{secrets.token_hex(4)}", SandboxSpec(limits, mounts=mounts))
        await self.outer.open(20)
        channel = self.channel = Channel(await call_from(self.outer, program(), timeout=20), self)
        home = "/home/user"
        folders = {"home": home, "folders": [home], "logs": "/logs", "links": {}}
        await channel.ask("begin", {**folders, "user": None, "seccomp": "", **BIG})
        stdin = channel.new_number()
        command = {
            "argv": [*self.body["Entrypoint"], *self.body["Cmd"]],
            "cwd": self.body["WorkingDir"],
            "env": dict(text.split("=", 1) for text in self.body["Env"]),
            "last": False,
            "guarded": [],
            "stdin": stdin,
            "stdout": self.hear(1),
            "stderr": self.hear(2),
        }
        await channel.ask("spawn", command)
        self.tasks.append(asyncio.ensure_future(self.feed(stdin)))

    def source(self, mount: dict[str, Any]) -> Path:
        return Path(mount["Source"]) if mount["Type"] == "bind" else self.engine.volumes[mount["Source"]][0]

    def hear(self, kind: int) -> int:
        def take(data: bytes) -> None:
            if data and self.attached is not None and self.channel is not None:
                self.attached[1].write(struct.pack(">BxxxI", kind, len(data)) + data)
                self.channel.grant(number, len(data))

        assert self.channel is not None
        number = self.channel.hear(take).number
        return number

    async def feed(self, stdin: int) -> None:
        assert self.attached is not None
        assert self.channel is not None
        with suppress(Exception):
            while data := await self.attached[0].read(65536):
                await self.channel.write(stdin, data)
            await self.channel.write(stdin, b"", end=True)

    def happened(self, words: list[Any]) -> None:
        if words[0] == "exit" and self.body["HostConfig"]["AutoRemove"]:
            self.engine.later(self.engine.remove(self))

    def ended(self) -> None:
        """The sandbox around it is gone."""

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        if self.channel is not None:
            await self.channel.close()
        if self.outer is not None:
            await self.outer.close()
        if self.attached is not None:
            self.attached[1].close()


class FakeEngine:
    """Use it as an async context manager. `requests` are all that came, `images` those that are there."""

    def __init__(
        self, folder: Path, *, version: str = "1.51", images: tuple[str, ...] = ("python:3.13-slim",)
    ) -> None:
        self.path = folder / "docker.sock"
        self.folder, self.version, self.images = folder, version, set(images)
        self.containers: dict[str, Container] = {}
        self.volumes: dict[str, tuple[Path, dict[str, str]]] = {}
        self.requests: list[tuple[str, str]] = []
        self._later: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "FakeEngine":
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
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        parts = urlsplit(target)
        self.requests.append((method, parts.path))
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path == "/_ping":
            self.reply(writer, 200, b"OK", kind="text/plain")
            return True
        found = re.fullmatch(r"/v([\d.]+)(/.*)", parts.path)
        if found is None or tuple(map(int, found[1].split("."))) > tuple(map(int, self.version.split("."))):
            self.tell(writer, 400, "client version is too new")
            return True
        words = found[2].strip("/").split("/")
        if words[0] == "containers" and words[-1] == "attach":
            return self.attach(reader, writer, words[1], headers)
        status, answer = await self.do(method, words, query, body)
        if isinstance(answer, list) and status == 200 and words[-1] == "create":
            self.stream(writer, answer)
        else:
            content = b"" if answer is None else json.dumps(answer).encode()
            self.reply(writer, status, content, kind="application/json")
        await writer.drain()
        return True

    def reply(self, writer: asyncio.StreamWriter, status: int, content: bytes, *, kind: str) -> None:
        head = f"HTTP/1.1 {status} Whatever\r\nApi-Version: {self.version}\r\nServer: Fake/1\r\n"
        body = "" if status == 204 else f"Content-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
        writer.write(f"{head}{body}\r\n".encode() + content)

    def tell(self, writer: asyncio.StreamWriter, status: int, message: str) -> None:
        self.reply(writer, status, json.dumps({"message": message}).encode(), kind="application/json")

    def stream(self, writer: asyncio.StreamWriter, messages: list[dict[str, Any]]) -> None:
        """As a pull is told: one JSON object after the other, in chunks that do not keep to them."""
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

    async def do(self, method: str, words: list[str], query: dict[str, str], body: bytes) -> tuple[int, Any]:
        match method, *words:
            case "GET", "images", *name, "json":
                image = "/".join(name)
                return (
                    (200, {"Id": "sha256:1"})
                    if image in self.images
                    else (404, {"message": f"No such image: {image}"})
                )
            case "POST", "images", "create":
                return self.pull(f"{query['fromImage']}:{query['tag']}")
            case "POST", "containers", "create":
                container = Container(self, json.loads(body))
                self.containers[container.id] = container
                return 201, {"Id": container.id, "Warnings": []}
            case "GET", "containers", "json":
                wanted = json.loads(query["filters"])["label"][0]
                return 200, [{"Id": one.id} for one in self.containers.values() if marked(one.body["Labels"], wanted)]
            case "POST", "volumes", "create":
                asked = json.loads(body)
                place = self.folder / "volumes" / asked["Name"]
                place.mkdir(parents=True)
                self.volumes[asked["Name"]] = (place, asked["Labels"])
                return 201, {"Name": asked["Name"]}
            case "GET", "volumes":
                wanted = json.loads(query["filters"])["label"][0]
                names = [name for name, (_, labels) in self.volumes.items() if marked(labels, wanted)]
                return 200, {"Volumes": [{"Name": name} for name in names]}
            case "DELETE", "volumes", name:
                return (204, None) if self.volumes.pop(name, None) else (404, {"message": "no such volume"})
        return await self.do_to_container(method, words, query, body)

    async def do_to_container(
        self, method: str, words: list[str], query: dict[str, str], body: bytes
    ) -> tuple[int, Any]:
        container = self.containers.get(words[1] if len(words) > 1 else "")
        if words[0] != "containers" or container is None:
            return 404, {"message": f"No such container: {'/'.join(words)}"}
        match method, *words[2:]:
            case "POST", "start":
                if container.body["Image"] == "no-python:1":
                    return 400, {"message": 'exec: "python3": executable file not found in $PATH'}
                await container.start()
                return 204, None
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
        self.images.add(image)
        return 200, [
            {"status": "Pulling"},
            {"status": "Downloading", "progressDetail": {"current": 1}},
            {"status": "Done"},
        ]


def marked(labels: dict[str, str], wanted: str) -> bool:
    name, _, value = wanted.partition("=")
    return labels.get(name) == value
