"""An engine that takes and returns token ids, in the form of vLLM, SGLang or llama.cpp, with a real BPE tokenizer.

It samples scripted texts. They are encoded in pieces, as a model may sample them: encoding the text again gives other
ids. Every request is logged as it came, so that the ids can be compared with those that are stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from capture.scripted_model import big_request

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOGPROB = -0.25
PIECE_CHARACTERS = 3
"""How much text is encoded at a time."""


@cache
def make_backend(special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    """A small byte-level BPE tokenizer, trained on the documentation, with the special tokens of a family."""
    tokenizer = Tokenizer.from_str(train_backend())
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


@cache
def train_backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    docs = Path(__file__).parents[2] / "docs"
    tokenizer.train_from_iterator([(docs / "rollouts.md").read_text()], trainer)
    return str(tokenizer.to_str())


def write_tokenizer(
    folder: Path, *, template: str | None = None, special: tuple[str, ...] = SPECIAL, backend: Tokenizer | None = None
) -> str:
    """A folder as a model has it."""
    folder.mkdir(parents=True, exist_ok=True)
    (backend or make_backend(special)).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def sample(text: str, special: tuple[str, ...] = SPECIAL) -> list[int]:
    """Ids of the text that its encoding would not give: special tokens whole, the rest in small pieces."""
    backend, ids, start = make_backend(special), [], 0
    while start < len(text):
        marker = next((each for each in special if text.startswith(each, start)), None)
        if marker is not None:
            ids.append(backend.token_to_id(marker))
            start += len(marker)
            continue
        nearest = min((at for each in special if (at := text.find(each, start)) != -1), default=len(text))
        piece = text[start : min(start + PIECE_CHARACTERS, nearest)]
        ids += backend.encode(piece).ids
        start += len(piece)
    return ids


def decode(ids: list[int], special: tuple[str, ...] = SPECIAL) -> str:
    return str(make_backend(special).decode(ids, skip_special_tokens=False))


@dataclass
class Reply:
    """What is sampled. `stop` is the token that ends it; None: it was cut off."""

    text: str
    stop: str | None = "<|im_end|>"
    finish_reason: str = "stop"

    def ids(self, special: tuple[str, ...]) -> list[int]:
        return sample(self.text + (self.stop or ""), special)


@dataclass
class LoggedCall:
    """One request as the engine got it."""

    body: dict[str, Any]
    prompt: list[int]
    sampled: list[int]


def tool_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass
class TokenEngine:
    """Use it as `async with`. `answer` gets the text of the prompt and the number of calls before."""

    answer: Callable[[str, int], Reply | str]
    engine: str = "vllm"
    tokens_per_event: int = 3
    missing_path: str | None = None
    cumulative: bool = True
    """Whether SGLang's events repeat all earlier tokens."""
    special: tuple[str, ...] = SPECIAL
    """The special tokens of its tokenizer."""
    breaks: list[int] = field(default_factory=list)
    """For each of the next streams, after how many events its connection breaks."""
    calls: list[LoggedCall] = field(default_factory=list)
    chat_bodies: list[dict[str, Any]] = field(default_factory=list)
    """Requests on the ordinary path."""
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def __aenter__(self) -> TokenEngine:
        server = web.Server(self._handle, handler_cancellation=True, request_factory=big_request, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            if request.path == "/v1/models":
                return web.json_response({"data": [{"id": "real", "owned_by": self.engine}]})
            if request.path == "/props":
                return web.json_response({"chat_template": CHATML, "eos_token": "<|im_end|>", "bos_token": ""})
            return web.json_response({"error": "no"}, status=404)
        body = json.loads(await request.read())
        if request.path in ("/tokenize", "/detokenize"):
            return self._tokenizer(request.path, body)
        if request.path == self.missing_path:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.path == "/v1/chat/completions":
            self.chat_bodies.append(body)
            choice = {"index": 0, "message": {"role": "assistant", "content": "seen"}, "finish_reason": "stop"}
            return web.json_response({"id": "x", "model": "real", "choices": [choice]})
        prompt = body.get("input_ids") or body.get("prompt") or body.get("token_ids")
        assert isinstance(prompt, list)
        assert all(isinstance(token, int) for token in prompt)
        made = self.answer(decode(prompt, self.special), len(self.calls))
        reply = Reply(made) if isinstance(made, str) else made
        sampling = {**body, **(body.get("sampling_params") or {})}
        limit = sampling.get("max_tokens") or sampling.get("max_new_tokens") or sampling.get("n_predict")
        sampled = reply.ids(self.special)
        ids = sampled[:limit]
        finish = "length" if len(ids) < len(sampled) else reply.finish_reason
        stop = next((each for each in sampling.get("stop") or () if each in decode(ids)), None)
        while stop is not None and stop in decode(ids[:-1]):
            ids = ids[:-1]
        self.calls.append(LoggedCall(body, prompt, ids))
        if request.path == "/inference/v1/generate":
            return web.json_response(vllm_generated(ids, finish))
        if body.get("stream"):
            return await self._stream(request, EVENTS[self.engine](self, prompt, ids, finish, stop))
        return web.json_response(WHOLE[self.engine](self, prompt, ids, finish, stop))

    async def _stream(self, request: web.BaseRequest, events: list[dict[str, Any]]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = self.breaks.pop(0) if self.breaks else len(events)
        for event in events[:count]:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if count < len(events) and request.transport is not None:
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response

    def _tokenizer(self, path: str, body: dict[str, Any]) -> web.Response:
        if path == "/tokenize":
            ids = make_backend().encode(body.get("prompt") or body.get("content") or "").ids
            return web.json_response({"tokens": ids, "count": len(ids)})
        text = decode(body["tokens"])
        return web.json_response({"prompt": text, "text": text, "content": text})

    def pieces(self, ids: list[int]) -> list[list[int]]:
        size = self.tokens_per_event
        return [ids[start : start + size] for start in range(0, len(ids), size)]


Made = Callable[[TokenEngine, list[int], list[int], str, str | None], Any]


def vllm_document(prompt: list[int] | None, ids: list[int], finish: str | None, stop: str | None) -> dict[str, Any]:
    logprobs = {
        "token_logprobs": [LOGPROB] * len(ids),
        "tokens": [decode([token]) for token in ids],
        "top_logprobs": [{decode([token]): LOGPROB} for token in ids],
    }
    choice = {"index": 0, "text": "", "token_ids": ids, "logprobs": logprobs, "finish_reason": finish}
    if prompt is not None:
        choice["prompt_token_ids"] = prompt
    return {"id": "x", "choices": [choice | {"stop_reason": stop}]}


def vllm_generated(ids: list[int], finish: str) -> dict[str, Any]:
    entries = [{"token": f"token_id:{token}", "logprob": LOGPROB, "top_logprobs": []} for token in ids]
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": entries}, "finish_reason": finish}
    return {"request_id": "x", "choices": [choice]}


def vllm_usage(prompt: list[int], ids: list[int]) -> dict[str, int]:
    return {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}


def vllm_whole(
    engine: TokenEngine, prompt: list[int], ids: list[int], finish: str, stop: str | None
) -> dict[str, Any]:
    return vllm_document(prompt, ids, finish, stop) | {"usage": vllm_usage(prompt, ids)}


def vllm_events(
    engine: TokenEngine, prompt: list[int], ids: list[int], finish: str, stop: str | None
) -> list[dict[str, Any]]:
    pieces = engine.pieces(ids)
    events = [
        vllm_document(
            prompt if index == 0 else None,
            piece,
            finish if index == len(pieces) - 1 else None,
            stop if index == len(pieces) - 1 else None,
        )
        for index, piece in enumerate(pieces)
    ]
    return [*events, {"id": "x", "choices": [], "usage": vllm_usage(prompt, ids)}]


def sglang_document(prompt: list[int], ids: list[int], total: int, finish: dict[str, Any] | None) -> dict[str, Any]:
    entries = [[LOGPROB, token, None] for token in ids]
    return {
        "text": decode(ids),
        "output_ids": ids,
        "meta_info": {
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": total,
            "output_token_logprobs": entries,
            "output_top_logprobs": [[entry] for entry in entries],
            "weight_version": "step-7",
        },
    }


def sglang_finish(finish: str, stop: str | None, ids: list[int]) -> dict[str, Any]:
    return {"type": finish, "matched": stop or ids[-1]} if finish == "stop" else {"type": finish, "length": len(ids)}


def sglang_whole(
    engine: TokenEngine, prompt: list[int], ids: list[int], finish: str, stop: str | None
) -> dict[str, Any]:
    return sglang_document(prompt, ids, len(ids), sglang_finish(finish, stop, ids))


def sglang_events(
    engine: TokenEngine, prompt: list[int], ids: list[int], finish: str, stop: str | None
) -> list[dict[str, Any]]:
    events, seen = [], 0
    for piece in engine.pieces(ids):
        seen += len(piece)
        end = sglang_finish(finish, stop, ids) if seen == len(ids) else None
        events.append(sglang_document(prompt, ids[:seen] if engine.cumulative else piece, seen, end))
    return events


def llama_entries(ids: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": token,
            "token": decode([token]),
            "logprob": LOGPROB,
            "top_logprobs": [{"id": token, "logprob": LOGPROB}],
        }
        for token in ids
    ]


def llama_end(prompt: list[int], ids: list[int], finish: str) -> dict[str, Any]:
    kind = "eos" if finish == "stop" else "limit"
    return {
        "content": "",
        "tokens": [],
        "stop": True,
        "stop_type": kind,
        "tokens_evaluated": len(prompt),
        "tokens_predicted": len(ids),
        "timings": {"cache_n": 0},
    }


def llama_whole(
    engine: TokenEngine, prompt: list[int], ids: list[int], finish: str, stop: str | None
) -> dict[str, Any]:
    return llama_end(prompt, ids, finish) | {"tokens": ids, "completion_probabilities": llama_entries(ids)}


WHOLE: dict[str, Made] = {"vllm": vllm_whole, "sglang": sglang_whole, "llamacpp": llama_whole}
EVENTS: dict[str, Made] = {"vllm": vllm_events, "sglang": sglang_events}
