"""Token mode: what it adds to a call, and what a trainer processes: `python -m bench.token_mode`.

A scripted engine in a process of its own answers at once, in the shape of vLLM's completions. A conversation of
tool calls grows to the size of the history. From then on each call is made through the proxy, and its ids are sent to
the engine directly as well; the difference of the medians is what the proxy and token mode add.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import orjson
from aiohttp import web

from paddock.capture.proxy import Capture
from paddock.capture.settings import CaptureSettings, TokenSettings
from paddock.capture.upstream import Upstream
from paddock.limits import Budget
from paddock.models.endpoint import Endpoint

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from paddock.capture.trace import Call

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)
TEXT = (Path(__file__).parents[1] / "docs" / "rollouts.md").read_text()
REPLY = 'I list the files.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
RESULT_CHARACTERS = 600
FILLING_CHARACTERS = 6_000
LARGEST_BODY = 1 << 28


def write_tokenizer(folder: Path) -> list[int]:
    """A small BPE tokenizer with the special tokens of Qwen 3. Returns the ids of the scripted reply."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(REPLY).ids
    return ids


async def serve_engine(report: Connection, ids: list[int]) -> None:
    logprobs = {"token_logprobs": [-0.5] * len(ids), "top_logprobs": [{"word": -0.5} for _ in ids]}
    choice = {"index": 0, "text": "", "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"}

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"data": [{"id": "m", "owned_by": "vllm"}]})
        # The prompt is repeated, as vLLM does it with `return_token_ids`.
        prompt = orjson.loads(await request.read())["prompt"]
        document = {"id": "x", "choices": [{**choice, "prompt_token_ids": prompt}]}
        return web.Response(body=orjson.dumps(document), content_type="application/json")

    def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=LARGEST_BODY)

    runner = web.ServerRunner(web.Server(handle, access_log=None, request_factory=make_request))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    report.send(runner.addresses[0][1])
    while not report.poll():
        await asyncio.sleep(0.1)


def engine_process(report: Connection, ids: list[int]) -> None:
    asyncio.run(serve_engine(report, ids))


class Cost(NamedTuple):
    """Milliseconds of one call, and of processor time in this process. On a busy machine only the latter is right."""

    wall: float
    cpu: float


class Clock:
    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self) -> Cost:
        return Cost((time.perf_counter() - self._wall) * 1000, (time.process_time() - self._cpu) * 1000)


def median(costs: list[Cost]) -> Cost:
    return Cost(*(round(statistics.median(each), 2) for each in zip(*costs, strict=True)))


class Conversation:
    """An agent that gets the result of a tool after each answer."""

    def __init__(self, session: aiohttp.ClientSession, url: str, capture: Capture) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "List the files."}]
        self._session, self._url, self._capture = session, url, capture

    async def ask(self) -> Cost:
        body = orjson.dumps({"model": "m", "messages": self.messages, "tools": TOOLS, "max_tokens": 64})
        clock = Clock()
        document = await post(self._session, f"{self._url}/chat/completions", body, self._capture.secret)
        cost = clock.stop()
        self.messages.append(document["choices"][0]["message"])
        return cost

    def add_result(self, characters: int) -> None:
        start = len(self.messages) * 97 % len(TEXT)
        text = (TEXT[start:] + TEXT * (1 + characters // len(TEXT)))[:characters]
        call_id = self.messages[-1]["tool_calls"][0]["id"]
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})


async def post(session: aiohttp.ClientSession, url: str, body: bytes, key: str = "") -> dict[str, Any]:
    async with session.post(url, data=body, headers={"Authorization": f"Bearer {key}"}) as response:
        raw = await response.read()
        if response.status != 200:
            raise SystemExit(f"status {response.status}: {raw[:300]!r}")
    document: dict[str, Any] = orjson.loads(raw)
    return document


async def measure(port: int, folder: Path, history: int, count: int) -> dict[str, float]:
    """Grow a conversation to `history` tokens, then measure `count` calls."""
    calls: list[Call] = []

    async def keep(call: Call) -> None:
        calls.append(call)

    engine = f"http://127.0.0.1:{port}/v1"
    sock = socket.create_server(("127.0.0.1", 0))
    async with Upstream() as upstream, aiohttp.ClientSession() as session:
        tokens = TokenSettings(str(folder), "qwen3")
        settings = CaptureSettings(budget=Budget(calls=None), tokens=tokens)
        capture = Capture(Endpoint(engine, "m"), upstream, settings, on_call=keep)
        await capture.serve(sock)
        agent = Conversation(session, f"http://127.0.0.1:{sock.getsockname()[1]}/v1", capture)
        await agent.ask()
        while len(capture.calls[-1].prompt_token_ids) < history:
            agent.add_result(FILLING_CHARACTERS)
            await agent.ask()
        proxied, direct = [], []
        for _ in range(count):
            agent.add_result(RESULT_CHARACTERS)
            proxied.append(await agent.ask())
            call = capture.calls[-1]
            body = orjson.dumps({**call.forwarded, "prompt": call.prompt_token_ids})
            clock = Clock()
            await post(session, f"{engine}/completions", body)
            direct.append(clock.stop())
        await capture.stop()
    check(calls)
    return {
        "history_tokens": len(calls[-1].prompt_token_ids),
        "direct_ms": median(direct).wall,
        "proxied_ms": median(proxied).wall,
        "added_ms": round(median(proxied).wall - median(direct).wall, 2),
        "added_cpu_ms": round(median(proxied).cpu - median(direct).cpu, 2),
    }


def check(calls: list[Call]) -> None:
    """Every call extends the one before: nothing has drifted."""
    for earlier, later in pairwise(calls):
        ids = earlier.prompt_token_ids + earlier.completion_token_ids
        if later.prompt_token_ids[: len(ids)] != ids:
            raise SystemExit(f"{later.id} does not extend {earlier.id}: {later.token_mode}")


async def count_training_tokens(port: int, folder: Path, calls: int) -> dict[str, float]:
    """Tokens of one sample for the whole conversation, and of one sample for each call."""
    recorded: list[Call] = []

    async def keep(call: Call) -> None:
        recorded.append(call)

    sock = socket.create_server(("127.0.0.1", 0))
    async with Upstream() as upstream, aiohttp.ClientSession() as session:
        settings = CaptureSettings(budget=Budget(calls=None), tokens=TokenSettings(str(folder), "qwen3"))
        capture = Capture(Endpoint(f"http://127.0.0.1:{port}/v1", "m"), upstream, settings, on_call=keep)
        await capture.serve(sock)
        agent = Conversation(session, f"http://127.0.0.1:{sock.getsockname()[1]}/v1", capture)
        await agent.ask()
        for _ in range(calls - 1):
            agent.add_result(RESULT_CHARACTERS)
            await agent.ask()
        await capture.stop()
    check(recorded)
    sizes = [len(call.prompt_token_ids) + len(call.completion_token_ids) for call in recorded]
    return {
        "calls": calls,
        "one_sample_tokens": sizes[-1],
        "call_by_call_tokens": sum(sizes),
        "share": round(sizes[-1] / sum(sizes), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", type=int, nargs="+", default=[20_000, 100_000])
    parser.add_argument("--calls", type=int, default=40)
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = multiprocessing.Process(target=engine_process, args=(theirs, write_tokenizer(folder)), daemon=True)
        process.start()
        port = ours.recv()
        for history in options.history:
            print(json.dumps(asyncio.run(measure(port, folder, history, options.calls))), flush=True)
        print(json.dumps(asyncio.run(count_training_tokens(port, folder, 50))))
        ours.send(None)
        process.join(5)


if __name__ == "__main__":
    main()
