"""The network by policy: through the egress proxy, and recorded."""

from __future__ import annotations

import asyncio
import http.server
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paddock.sandbox.base import Command
from paddock.sandbox.network.policy import NO_NETWORK, NetworkPolicy
from paddock.testing.checks import require
from paddock.testing.sandbox.commands import it_runs_a_command
from paddock.testing.sandbox.subject import COMMAND_SECONDS, SandboxSubject, check, require_isolation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paddock.sandbox.base import Completed, Sandbox

LOOPBACK = NetworkPolicy("allowlist", ("127.0.0.0/8",))
FETCH = """
import os, sys, urllib.error, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": os.environ["http_proxy"]}))
del os.environ["no_proxy"], os.environ["NO_PROXY"]
try:
    print(opener.open(sys.argv[1], timeout=10).read().decode())
except urllib.error.HTTPError as error:
    print(error.code)
"""


class HelloHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@contextmanager
def serving() -> Iterator[int]:
    """The port of a server on the loopback interface of this machine."""
    with http.server.HTTPServer(("127.0.0.1", 0), HelloHandler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@check("connect through the egress proxy as the policy says, and record it", needs=[it_runs_a_command])
async def connections_follow_the_policy(subject: SandboxSubject) -> None:
    require_isolation(subject)
    async with subject.another() as sandbox:
        with serving() as port:
            await sandbox.set_network(LOOPBACK, phase="agent")
            allowed = await fetch(sandbox, port)
            await sandbox.set_network(NO_NETWORK, phase="verifier")
            refused = await fetch(sandbox, port)
    require(allowed.stdout == b"hello\n", f"an allowed host was not reached: {allowed}")
    require(refused.stdout == b"403\n", f"a refused host was reached: {refused}")
    recorded = [(record.phase, record.allowed) for record in sandbox.connections]
    require(recorded == [("agent", True), ("verifier", False)], f"the records are {recorded}")


async def fetch(sandbox: Sandbox, port: int) -> Completed:
    command = Command(["python3", "-c", FETCH, f"http://127.0.0.1:{port}/"])
    return await asyncio.wait_for(sandbox.exec(command, timeout=COMMAND_SECONDS), 2 * COMMAND_SECONDS)
