"""A package store on loopback that answers Harbor's client and ours, for published packages in memory."""

import base64
import gzip
import hashlib
import io
import json
import tarfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tasks.datasets.repositories import serve

KEY = "sb_publishable_test"
API_KEY = "hk_test"
Files = Mapping[str, str | bytes]


def make_token() -> str:
    """In the form of a JWT: Harbor's client reads the user and the end of its validity from it."""
    payload = {"sub": "tester", "role": "authenticated", "exp": int(time.time()) + 86_400}
    parts = [json.dumps(part).encode() for part in ({"alg": "HS256", "typ": "JWT"}, payload)]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (*parts, b"signature"))


TOKEN = make_token()
OK = (200, False)


def encoded(files: Files) -> dict[str, bytes]:
    return {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}


def hash_of(files: Files) -> str:
    """The content hash as Harbor documents it."""
    lines = [f"{path}\0{hashlib.sha256(data).hexdigest()}\n" for path, data in sorted(encoded(files).items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def archive_of(files: Files) -> bytes:
    """In the form that `harbor publish` uploads."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in sorted(encoded(files).items()):
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(data), 0o755 if path.endswith(".sh") else 0o644
            archive.addfile(member, io.BytesIO(data))
    return gzip.compress(buffer.getvalue())


@dataclass
class Store:
    versions: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)
    """The versions of each package, by its kind and its name. The oldest is first."""
    private: set[str] = field(default_factory=set)
    archives: dict[str, bytes] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    """How often each path was asked for."""
    failures: list[tuple[int, bool]] = field(default_factory=list)
    """The status of the next requests, and whether the connection ends within the answer. OK: an ordinary answer."""
    tokens: list[str] = field(default_factory=lambda: [TOKEN])
    """What an API key is exchanged for. Only TOKEN is valid, and the last one is given again."""
    archives_elsewhere: str = ""
    """An address that has the archives. The store redirects to it."""
    most_rows: int = 1000
    """Of a page, also if more are asked for."""
    slow: set[str] = field(default_factory=set)
    """Tasks whose archives arrive byte by byte."""

    def publish_task(
        self, name: str, files: Files, *, archive: bytes | None = None, tags: tuple[str, ...] = ()
    ) -> str:
        """Returns the digest."""
        content_hash = hash_of(files)
        path = f"packages/{name}/{content_hash}/dist.tar.gz"
        self.archives[path] = archive_of(files) if archive is None else archive
        self.add("task", name, {"content_hash": content_hash, "archive_path": path})
        return f"sha256:{content_hash}"

    def publish_dataset(self, name: str, tasks: Mapping[str, str], tags: tuple[str, ...] = ()) -> str:
        """`tasks` are digests by name. Returns the digest."""
        content_hash = hashlib.sha256(json.dumps(sorted(tasks.items())).encode()).hexdigest()
        self.add("dataset", name, {"content_hash": content_hash, "tasks": dict(tasks)}, tags)
        return f"sha256:{content_hash}"

    def add(self, kind: str, name: str, version: dict[str, Any], tags: tuple[str, ...] = ()) -> None:
        versions = self.versions.setdefault((kind, name), [])
        for earlier in versions:
            earlier["tags"] -= {*tags, "latest"}
        number = len(versions) + 1
        versions.append({"id": str(uuid.uuid4()), "revision": number, "tags": {*tags, "latest"}, **version})

    def find(self, kind: str, name: str, reference: str) -> dict[str, Any] | None:
        for version in self.versions.get((kind, name), []):
            if reference in {f"sha256:{version['content_hash']}", str(version["revision"]), *version["tags"]}:
                return version
        return None

    def dataset(self, version: str) -> dict[str, Any]:
        return next(each for versions in self.versions.values() for each in versions if each["id"] == version)


class Handler(BaseHTTPRequestHandler):
    store: Store

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.store.requests[path] += 1
        failure = self.store.failures.pop(0) if self.store.failures else OK
        key, token = self.headers.get("apikey"), self.headers.get("Authorization", "").removeprefix("Bearer ")
        if failure != OK:
            status, is_cut = failure
            data = json.dumps({"message": f"out of order \x1b[31m for {key} {token}"}).encode()
            self._send(status, data, length=len(data) + is_cut)
        elif key != KEY or token not in {KEY, TOKEN, ""}:
            self._send(401, json.dumps({"message": f"Invalid API key {key} or token {token}"}).encode())
        elif path.startswith("/elsewhere/"):
            self._send(200, self.store.archives[path.removeprefix("/elsewhere/")])
        elif path.startswith("/storage/v1/object/packages/"):
            self._answer_storage(path.removeprefix("/storage/v1/object/packages/"), body)
        else:
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            answer = self._rows(path, query) if self.command == "GET" else self._called(path, body)
            self._send(200, json.dumps(answer).encode())

    def _answer_storage(self, path: str, body: bytes) -> None:
        if self.command == "POST":
            form = BytesParser(policy=HTTP).parsebytes(
                f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode() + body
            )
            (file,) = (part for part in form.iter_parts() if part.get_filename())
            data = file.get_payload(decode=True)
            assert isinstance(data, bytes)
            self.store.archives[path] = data
            self._send(200, json.dumps({"Key": f"packages/{path}", "Id": "1"}).encode())
        elif self.store.archives_elsewhere:
            self.send_response(302)
            self.send_header("Location", f"{self.store.archives_elsewhere}/{path}")
            self.end_headers()
        elif any(name in path for name in self.store.slow):
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            with suppress(OSError):
                for _ in range(1000):
                    self.wfile.write(b"x")
                    time.sleep(0.02)
        elif path in self.store.archives:
            self._send(200, self.store.archives[path])
        else:
            self._send(400, json.dumps({"statusCode": "404", "message": "Object not found"}).encode())

    def _rows(self, path: str, query: dict[str, str]) -> list[Any]:
        equal = {key: value.removeprefix("eq.") for key, value in query.items() if value.startswith("eq.")}
        match path.rpartition("/")[2]:
            case "package":
                name = f"{equal['org.name']}/{equal['name']}"
                kinds = [kind for kind, other in self.store.versions if other == name and self._may_read(name)]
                return [{"id": "1", "type": kind, "visibility": "public", "org": {}} for kind in kinds]
            case "dataset_version_tag":
                version = self._dataset(equal, equal["tag"])
                return [{"dataset_version": {**version, "tags": None}, "package": {}}] if version else []
            case "dataset_version":
                version = self._dataset(equal, equal.get("revision") or f"sha256:{equal['content_hash']}")
                return [{**version, "tags": None, "package": {}}] if version else []
            case "dataset_version_task":
                tasks = sorted(self.store.dataset(equal["dataset_version_id"])["tasks"].items())
                start = int(query["offset"])
                limit = min(int(query["limit"]), self.store.most_rows)
                return [_task_row(*task) for task in tasks[start : start + limit]]
        return []

    def _dataset(self, equal: dict[str, str], reference: str) -> dict[str, Any] | None:
        return self.store.find("dataset", f"{equal['package.org.name']}/{equal['package.name']}", reference)

    def _called(self, path: str, body: bytes) -> Any:
        values = json.loads(body)
        match path.rpartition("/")[2]:
            case "api-key-exchange":
                if values["api_key"] != API_KEY:
                    return {}
                token = self.store.tokens.pop(0) if len(self.store.tokens) > 1 else self.store.tokens[0]
                return {"access_token": token, "expires_in": 3600}
            case "resolve_task_version":
                version = self.store.find("task", f"{values['p_org']}/{values['p_name']}", values["p_ref"])
                return version and {**version, "tags": None}
            case "publish_task_version":
                added = {"content_hash": values["p_content_hash"], "archive_path": values["p_archive_path"]}
                self.store.add("task", f"{values['p_org']}/{values['p_name']}", added, tuple(values["p_tags"]))
                return {"id": "1", "revision": 1, "content_hash": values["p_content_hash"], "created": True}
            case "publish_dataset_version":
                tasks = {f"{task['org']}/{task['name']}": task["digest"] for task in values["p_tasks"]}
                name = f"{values['p_org']}/{values['p_name']}"
                digest = self.store.publish_dataset(name, tasks, tuple(values["p_tags"]))
                return {"id": "1", "revision": 1, "content_hash": digest.removeprefix("sha256:"), "created": True}
        return {}

    def _may_read(self, name: str) -> bool:
        return name not in self.store.private or self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _send(self, status: int, data: bytes, *, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status == 429:
            self.send_header("Retry-After", "0.02")
        self.send_header("Content-Length", str(length or len(data)))
        self.end_headers()
        self.wfile.write(data)


def _task_row(name: str, digest: str) -> dict[str, Any]:
    organization, _, short_name = name.partition("/")
    package = {"name": short_name, "org": {"name": organization}}
    task = {"content_hash": digest.removeprefix("sha256:"), "package": package}
    return {"task_version_id": name, "task_version": task}


@contextmanager
def serve_store(store: Store) -> Iterator[str]:
    with serve(type("StoreHandler", (Handler,), {"store": store})) as url:
        yield url
