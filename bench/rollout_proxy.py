"""What the capture proxy adds to a model call: `python -m bench.rollout_proxy`.

A scripted model in a process of its own answers at once, in the shape of vLLM. The same calls are made to it
directly and through the proxy; the difference of the medians is the proxy's own cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
from aiohttp import web

from paddock.capture.proxy import Capture
from paddock.capture.settings import CaptureSettings
from paddock.capture.upstream import Upstream
from paddock.limits import Budget
from paddock.models.endpoint import Endpoint

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from paddock.capture.trace import Call

PROMPT_BYTES = 20_000
PROMPT_TOKENS = 5_000
COMPLETION_TOKENS = 64
TOKENS_PER_CHUNK = 4


def entry(token: int) -> dict[str, Any]:
    return {"token": "word", "logprob": -0.5, "bytes": [119], "top_logprobs": [{"token": "word", "logprob": -0.5}]}


def unary() -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word" * COMPLETION_TOKENS},
        "finish_reason": "stop",
        "token_ids": list(range(COMPLETION_TOKENS)),
        "logprobs": {"content": [entry(token) for token in range(COMPLETION_TOKENS)]},
    }
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": COMPLETION_TOKENS}
    prompt = list(range(PROMPT_TOKENS))
    return orjson.dumps({"id": "x", "model": "m", "prompt_token_ids": prompt, "choices": [choice], "usage": usage})


def chunks() -> list[bytes]:
    made = []
    for start in range(0, COMPLETION_TOKENS, TOKENS_PER_CHUNK):
        ids = list(range(start, start + TOKENS_PER_CHUNK))
        last = start + TOKENS_PER_CHUNK >= COMPLETION_TOKENS
        choice = {
            "index": 0,
            "delta": {"content": "word" * TOKENS_PER_CHUNK},
            "finish_reason": "stop" if last else None,
            "token_ids": ids,
            "logprobs": {"content": [entry(token) for token in ids]},
        }
        chunk: dict[str, Any] = {"id": "x", "model": "m", "choices": [choice]}
        if not start:
            chunk["prompt_token_ids"] = list(range(PROMPT_TOKENS))
        made.append(b"data: " + orjson.dumps(chunk) + b"\n\n")
    return [*made, b"data: [DONE]\n\n"]


async def serve_model(report: Connection) -> None:
    document, pieces = unary(), chunks()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"data": [{"id": "m", "owned_by": "vllm"}]})
        if not orjson.loads(await request.read()).get("stream"):
            return web.Response(body=document, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    runner = web.ServerRunner(web.Server(handle, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    report.send(runner.addresses[0][1])
    while not report.poll():
        await asyncio.sleep(0.1)


def model_process(report: Connection) -> None:
    asyncio.run(serve_model(report))


async def measure(session: aiohttp.ClientSession, url: str, key: str, stream: bool, count: int) -> list[float]:
    """Milliseconds of each of `count` calls, one after the other."""
    times = []
    for number in range(count):
        messages = [{"role": "system", "content": "x" * PROMPT_BYTES}, {"role": "user", "content": str(number)}]
        capture = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
        body = orjson.dumps({"model": "m", "messages": messages, "stream": stream, "max_tokens": 64, **capture})
        headers = {"Authorization": f"Bearer {key}"}
        before = time.perf_counter()
        async with session.post(f"{url}/chat/completions", data=body, headers=headers) as response:
            await response.read()
            if response.status != 200:
                raise SystemExit(f"status {response.status}")
        times.append((time.perf_counter() - before) * 1000)
    return times


async def compare(port: int, count: int) -> dict[str, float]:
    report: dict[str, float] = {}
    collected: list[Call] = []

    async def keep(call: Call) -> None:
        collected.append(call)

    direct = f"http://127.0.0.1:{port}/v1"
    sock = socket.create_server(("127.0.0.1", 0))
    proxied = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    async with Upstream() as upstream, aiohttp.ClientSession() as session:
        settings = CaptureSettings(budget=Budget(calls=None))
        capture = Capture(Endpoint(direct, "m"), upstream, settings, on_call=keep)
        await capture.serve(sock)
        for name, stream in (("unary", False), ("stream", True)):
            times: dict[str, list[float]] = {"direct": [], "proxied": []}
            await measure(session, proxied, capture.secret, stream, 20)
            # In turns, so that a busy moment of the machine falls on both.
            for _ in range(count // 20):
                times["direct"] += await measure(session, direct, "", stream, 20)
                times["proxied"] += await measure(session, proxied, capture.secret, stream, 20)
            medians = {way: statistics.median(each) for way, each in times.items()}
            report[f"{name}_direct_ms"] = round(medians["direct"], 3)
            report[f"{name}_proxied_ms"] = round(medians["proxied"], 3)
            report[f"{name}_added_ms"] = round(medians["proxied"] - medians["direct"], 3)
        await capture.stop()
    if any(call.level != "tokens" for call in collected):
        raise SystemExit("a call was not kept token by token")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=model_process, args=(theirs,), daemon=True)
    process.start()
    try:
        report = asyncio.run(compare(ours.recv(), arguments.count))
    finally:
        ours.send("stop")
        process.join(5)
    if arguments.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:<20} {value:8.3f}")


if __name__ == "__main__":
    main()
