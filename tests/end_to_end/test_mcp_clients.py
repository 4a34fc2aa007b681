"""Ordinary MCP clients use an environment's tools at /mcp, as they would use FastMCP's own server."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paddock.agents.install import fetch_node, fetch_npm_tree

from .messages import TAKES_A_MESSAGE
from .processes import Server, run_client
from .shapes import Including, Matching

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(60, func_only=True)]

CLIENTS = {
    "mcp 1": ("mcp1", "mcp1_client.py"),
    "mcp 2, auto": ("mcp2", "mcp2_client.py", "auto"),
    "mcp 2, legacy": ("mcp2", "mcp2_client.py", "legacy"),
    "mcp 2, 2026-07-28": ("mcp2", "mcp2_client.py", "2026-07-28"),
    "fastmcp, auto": ("fastmcp", "fastmcp_client.py", "auto"),
    "fastmcp, legacy": ("fastmcp", "fastmcp_client.py", "legacy"),
    "fastmcp, 2026-07-28": ("fastmcp", "fastmcp_client.py", "2026-07-28"),
}
INVALID_PARAMS = -32602
TYPESCRIPT_SDK = "1.32.2"
UNKNOWN_TOOL = [Matching("nope"), None, True]


@pytest.fixture(scope="module", params=["echo_server", "fastmcp_echo"], ids=["paddock", "fastmcp server"])
def server(request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="module", params=CLIENTS.values(), ids=CLIENTS.keys())
def answers(request: pytest.FixtureRequest, server: Server) -> dict[str, Any]:
    peer, script, *mode = request.param
    return run_client(peer, script, f"{server.url}/mcp", *mode)


def said(message: str) -> list[Any]:
    return [message, {"result": message}, False]


def test_the_tools_are_listed(answers: dict[str, Any]) -> None:
    assert answers["tools"] == {"echo_message": TAKES_A_MESSAGE, "echo_with_length": TAKES_A_MESSAGE}


def test_tools_are_called(answers: dict[str, Any]) -> None:
    assert answers["calls"] == [said("hi"), [Matching("hello"), {"message": "hello", "length": 5}, False]]


def test_an_unknown_tool_is_refused_and_the_client_goes_on(server: Server, answers: dict[str, Any]) -> None:
    refusal = INVALID_PARAMS if server.framework == "paddock" else UNKNOWN_TOOL
    assert answers["unknown_tool"] == {"refusal": refusal, "after": said("hi")}


def test_two_clients_do_not_affect_each_other(answers: dict[str, Any]) -> None:
    assert answers["two_at_once"] == [said("one"), said("two"), said("one again"), said("alone")]


def test_the_official_client_speaks_websocket_too(echo_server: Server) -> None:
    url = echo_server.url.replace("http://", "ws://") + "/mcp"
    answers = run_client("openenv", "mcp1_client.py", url)
    assert answers == Including(
        tools=Including(echo_message=TAKES_A_MESSAGE),
        calls=[said("hi"), [Matching("hello"), {"message": "hello", "length": 5}, False]],
        unknown_tool={"refusal": INVALID_PARAMS, "after": said("hi")},
    )


def test_the_typescript_client_lists_and_calls(echo_server: Server) -> None:
    """It is stricter than those of Python: a null where a key may only be left out, and it refuses the answer."""
    tree = asyncio.run(fetch_npm_tree("@modelcontextprotocol/sdk", TYPESCRIPT_SDK, print, timeout=120))
    node = asyncio.run(fetch_node(print, timeout=120)) / "node"
    script = Path(__file__).parent / "clients" / "typescript_client.mjs"
    command = [str(node), str(script), str(tree / "node_modules"), f"{echo_server.url}/mcp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "tools": ["echo_message", "echo_with_length"],
        "said": [{"type": "text", "text": "hi"}],
        "structured": {"message": "hello", "length": 5},
        "unknown": INVALID_PARAMS,
    }
