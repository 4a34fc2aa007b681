"""Serve two environments and act in them over every transport: python examples/transports.py."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

from paddock import Client, PaddockError, SyncClient, VectorClient
from paddock.envs.counter import Counter, Total
from paddock.net import HttpConnection

if TYPE_CHECKING:
    from collections.abc import Iterator

console = Console(highlight=False)


@contextmanager
def served(target: str) -> Iterator[str]:
    """`paddock serve TARGET` in a process of its own; gives the URL, ends it afterwards."""
    command = [
        sys.executable,
        "-m",
        "paddock",
        "serve",
        target,
        "--port",
        "0",
        "--json",
        "--log-level",
        "error",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.terminate()


def heading(text: str) -> None:
    console.print(f"\n[bold cyan]{text}[/]")


async def over_websocket(url: str) -> None:
    heading("WebSocket: an episode with typed observations, through a dropped connection")
    async with Client(url, observation=Total) as env:
        await env.reset(seed=7)
        for amount in (3, 4):
            result = await env.step({"amount": amount})
            console.print(f"  add {amount}: total {result.observation.total}, reward {result.reward}")
        console.print("  [yellow]the connection drops[/]")
        env.transport.drop()  # type: ignore[attr-defined]
        result = await env.step({"amount": 5})
        console.print(f"  add 5: total {result.observation.total}, done {result.done}  (the same episode)")
        try:
            await env.step({"amount": -1})
        except PaddockError as error:
            problem = error.data["errors"][0]
            console.print(f"  add -1: {type(error).__name__}: {problem['loc'][0]}: {problem['msg']}")


def over_http(url: str) -> None:
    heading("HTTP: /reset hands out a Session-Id, /step and /state go on in it")
    env: SyncClient[dict[str, Any]]
    with SyncClient(url, transport="http") as env:
        env.reset()
        env.step({"amount": 6})
        console.print(f"  state: {env.state()}")


async def over_mcp(url: str) -> None:
    heading("MCP: what any MCP client sends to /mcp")
    connection = HttpConnection(url)
    session: dict[str, str] = {}

    async def call(method: str, **params: object) -> dict[str, object]:
        document = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        _, headers, body = await connection.request("POST", "/mcp", json.dumps(document).encode(), session)
        if "mcp-session-id" in headers:
            session["mcp-session-id"] = headers["mcp-session-id"]
        result: dict[str, object] = json.loads(body)["result"]
        return result

    opened = await call("initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo={})
    console.print(f"  initialize: revision {opened['protocolVersion']}")
    tools = (await call("tools/list"))["tools"]
    console.print(f"  tools/list: {', '.join(tool['name'] for tool in tools)}")  # type: ignore[attr-defined]
    answer = await call("tools/call", name="echo_with_length", arguments={"message": "hello"})
    console.print(f"  tools/call: {answer['structuredContent']}")
    await connection.request("DELETE", "/mcp", b"", session)
    await connection.close()


async def many_at_once(url: str) -> None:
    heading("Vector: 50 sessions over one connection, one frame per step of all")
    async with VectorClient(url, sessions=50) as envs:
        await envs.reset_all(seeds=range(50))
        results = await envs.step_all([{"amount": i % 3} for i in range(50)])
        total = sum(result.reward or 0 for result in results if not isinstance(result, PaddockError))
        console.print(f"  {len(results)} answers, rewards add up to {total}")


async def in_memory() -> None:
    heading("In memory: the same client, no server")
    env: Client[Total]
    async with Client(Counter) as env:
        await env.reset()
        console.print(f"  {(await env.step({'amount': 10})).observation!r}")


async def play(counter: str, echo: str) -> None:
    await over_websocket(counter)
    await asyncio.to_thread(over_http, counter)
    await over_mcp(echo)
    await many_at_once(counter)
    await in_memory()


def main() -> None:
    with served("counter") as counter, served("echo") as echo:
        console.print(f"counter at {counter}, echo at {echo}")
        asyncio.run(play(counter, echo))
    console.print("\n[bold green]Everything worked.[/] Next: [bold]paddock new my-env[/], and docs/ for the rest.")


if __name__ == "__main__":
    main()
