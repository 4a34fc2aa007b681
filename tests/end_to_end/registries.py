"""Debian's `docker-registry` on loopback."""

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STARTUP_SECONDS = 30.0
COPY_SECONDS = 120
CONFIG = """version: 0.1
log: {{level: error}}
storage:
  filesystem: {{rootdirectory: {folder}}}
  delete: {{enabled: true}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def missing_programs() -> str:
    """Why these tests cannot run here, or nothing."""
    missing = [name for name in ("docker-registry", "skopeo") if shutil.which(name) is None]
    return (
        f"{' and '.join(missing)} missing: python -m scripts.debian_packages {' '.join(missing)}" if missing else ""
    )


@contextmanager
def registry_running(folder: Path) -> Iterator[str]:
    """`HOST:PORT` of a registry that keeps its images in `folder`."""
    port = free_port()
    folder.mkdir(exist_ok=True)
    config = folder / "config.yml"
    config.write_text(CONFIG.format(folder=folder / "data", port=port))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OTEL_TRACES_EXPORTER": "none"},
        )
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}/v2/", process, folder / "log")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    ends_at = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < ends_at:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.05)
    raise TimeoutError(f"docker-registry does not answer: {log.read_text()[-2000:]}")


def copy_image(source: str, target: str, *options: str) -> None:
    """`skopeo copy`, with transports such as `docker-archive:` and `docker://`."""
    command = ["skopeo", "--insecure-policy", "copy", "--quiet", "--src-tls-verify=false", "--dest-tls-verify=false"]
    done = subprocess.run(
        [*command, *options, source, target], capture_output=True, text=True, timeout=COPY_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
