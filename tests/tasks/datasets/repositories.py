"""Git repositories with tasks, and servers on loopback that offer files and repositories."""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

AUTHOR = ("-c", "user.name=tester", "-c", "user.email=tester@example.com", "-c", "protocol.file.allow=always")


def git(folder: Path, *words: str) -> str:
    command = ["git", *AUTHOR, *words]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=30)
    return done.stdout.strip()


def make_repository(folder: Path, files: dict[str, str]) -> str:
    """A repository with one commit on the branch `main`. Returns the commit."""
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    return commit_files(folder, files)


def commit_files(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "change")
    return git(folder, "rev-parse", "HEAD")


def task_files(*names: str, below: str = "tasks/") -> dict[str, str]:
    return {f"{below}{name}/instruction.md": f"Do {name}." for name in names}


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """The address at which the files of a folder can be downloaded: git's dumb protocol too."""
    with serve(partial(QuietFiles, directory=str(folder))) as url:
        yield url


class GitBackend(BaseHTTPRequestHandler):
    """Runs git's own CGI program: the smart protocol."""

    root: Path

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes) -> None:
        parts = urlsplit(self.path)
        variables = {
            **os.environ,
            "GIT_PROJECT_ROOT": str(self.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "PATH_INFO": parts.path,
            "QUERY_STRING": parts.query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
        }
        done = subprocess.run(["git", "http-backend"], input=body, env=variables, capture_output=True, timeout=30)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        fields = [line.split(": ", 1) for line in head.decode().splitlines()]
        status = next((value for name, value in fields if name == "Status"), "200")
        self.send_response(int(status.split()[0]))
        for name, value in fields:
            if name != "Status":
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serve_repositories(folder: Path) -> Iterator[str]:
    handler = type("Backend", (GitBackend,), {"root": folder})
    with serve(handler) as url:
        yield url


@contextmanager
def serve(handler: Any) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
