"""Notes as an MCP server on stdio, made with whichever official package is here. Usage: stdio_notes.py"""

import os
import subprocess
import sys
import time
from typing import Any

try:
    from fastmcp import FastMCP as Server
except ImportError:
    try:
        from mcp.server import MCPServer as Server
    except ImportError:
        from mcp.server.fastmcp import FastMCP as Server

server: Any = Server("notes")
notes: list[str] = []


@server.tool()
def add_note(text: str) -> list[str]:
    """Keep a note, and tell them all."""
    notes.append(text)
    return notes


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("the note is gone")


@server.tool()
def process() -> int:
    """The id of this process."""
    return os.getpid()


@server.tool()
def start_another() -> int:
    """Start a process that stays, and tell its id."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


@server.tool()
def variable(name: str) -> str:
    """What a variable of this process holds."""
    return os.environ.get(name, "nothing")


@server.tool()
def sleep(seconds: float) -> str:
    """Take some time."""
    time.sleep(seconds)
    return "slept"


if __name__ == "__main__":
    server.run()
