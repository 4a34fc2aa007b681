"""An MCP server with one tool, which returns a word. It runs in a sandbox as a file of its own, without Paddock.

mcp_program.py stdio WORD
mcp_program.py http PORT WORD      streamable HTTP at /mcp, SSE at /sse; returns as soon as it listens
"""

import json
import os
import queue
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOOL = "read_word"
DEFAULT_VERSION = "2025-06-18"
POLL_SECONDS = 1.0


def answer(message: dict[str, Any], word: str) -> dict[str, Any] | None:
    """The response to a request; None for a notification."""
    if "id" not in message:
        return None
    result: dict[str, Any]
    match message.get("method"):
        case "initialize":
            version = message["params"].get("protocolVersion", DEFAULT_VERSION)
            info = {"name": "words", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            schema = {"type": "object", "properties": {}}
            result = {"tools": [{"name": TOOL, "description": "Returns a word.", "inputSchema": schema}]}
        case "tools/call":
            result = {"content": [{"type": "text", "text": word}], "isError": False}
        case "ping":
            result = {}
        case method:
            error = {"code": -32601, "message": f"no method {method}"}
            return {"jsonrpc": "2.0", "id": message["id"], "error": error}
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def serve_stdio(word: str) -> None:
    for line in sys.stdin:
        response = answer(json.loads(line), word)
        if response is not None:
            print(json.dumps(response), flush=True)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    word: str
    events: "queue.Queue[dict[str, Any]]" = queue.Queue()
    """Responses for the client that has `/sse` open."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        response = answer(json.loads(body), self.word)
        if self.path not in ("/mcp", "/messages"):
            self._respond(405, b"")
        elif response is None:
            self._respond(202, b"")
        elif self.path == "/mcp":
            self._respond(200, json.dumps(response).encode())
        else:
            self.events.put(response)
            self._respond(202, b"")

    def do_GET(self) -> None:
        if self.path != "/sse":
            self._respond(405, b"")
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.close_connection = True
        self.wfile.write(b"event: endpoint\ndata: /messages\n\n")
        while True:
            try:
                data = json.dumps(self.events.get(timeout=POLL_SECONDS))
                self.wfile.write(f"event: message\ndata: {data}\n\n".encode())
            except queue.Empty:
                self.wfile.write(b": still here\n\n")

    def do_DELETE(self) -> None:
        self._respond(405, b"")

    def _respond(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def serve_http(port: int, word: str) -> None:
    Handler.word = word
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if os.fork() != 0:
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        serve_stdio(sys.argv[2])
    else:
        serve_http(int(sys.argv[2]), sys.argv[3])
