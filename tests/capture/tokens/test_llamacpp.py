"""A real llama.cpp with SmolLM2: its own tokenizer, and what it evaluates of a conversation that is extended."""

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from paddock.capture.dialects.chat import ChatWriter, write_openai_error
from paddock.capture.exchange import Exchange
from paddock.capture.masking import Mask
from paddock.capture.probe import DiscardedReply
from paddock.capture.settings import CaptureSettings, TokenSettings
from paddock.capture.tokens.conversations import TokenConversations
from paddock.capture.tokens.opening import RenderingSource
from paddock.capture.tokens.tokenizer import open_tokenizer
from paddock.capture.trace import Call
from paddock.capture.upstream import Upstream
from paddock.models.endpoint import Endpoint
from paddock.models.local import find_weights, open_local_server

pytest.importorskip("xllamacpp")

TEXTS = (
    "Hello world, it's 2026 and 12345 things  cost $3.50!\n\n\tdef f(x):\n    return x**2\n",
    "ünïcode 🙂 日本語, <|im_start|>user\nhi<|im_end|>\n  trailing   ",
)


async def ask(
    tokens: TokenConversations, upstream: Upstream, endpoint: Endpoint, number: int, chat: dict, max_tokens: int = 8
) -> Call:
    call = Call(f"c{number}", number, request=chat)
    exchange = Exchange(
        call=call,
        chat=chat,
        writer=ChatWriter("local", include_usage=True),
        error_body=write_openai_error,
        endpoint=endpoint,
        upstream=upstream,
        settings=CaptureSettings(temperature=0.0, tokens=TokenSettings()),
        reply=DiscardedReply(),
        mask=Mask.of_endpoint(endpoint),
        headers={},
        max_tokens=max_tokens,
        ends_at=asyncio.get_running_loop().time() + 50,
        tokens=tokens,
    )
    await exchange.run()
    assert call.error is None
    return call


def test_a_real_engine_gets_each_token_once() -> None:
    async def body() -> None:
        weights = await find_weights(Path("/nowhere"), print)
        async with open_local_server(weights, print) as url, Upstream() as upstream:
            endpoint = Endpoint(url, weights.stem, engine="llamacpp")
            tokenizer = open_tokenizer(str(weights))
            for text in TEXTS:
                body = {"content": text, "add_special": False, "parse_special": True}
                answer = await upstream.post_to_root(endpoint, "/tokenize", body)
                assert answer["tokens"] == tokenizer.encode(text)
            source = RenderingSource(TokenSettings(), endpoint, upstream, thinking=None)
            tokens = TokenConversations(source, print)
            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something."}]
            calls: list[Call] = []
            for number in range(3):
                chat = {"messages": messages, "stream": True, "seed": 1}
                calls.append(await ask(tokens, upstream, endpoint, number, chat))
                messages = [*messages, calls[-1].message, {"role": "user", "content": "Say more."}]
            for earlier, later in pairwise(calls):
                ids = earlier.prompt_token_ids + earlier.completion_token_ids
                assert later.prompt_token_ids[: len(ids)] == ids
                # The engine has no state yet for the token that it sampled last.
                assert later.usage["prompt_tokens_details"]["cached_tokens"] >= len(ids) - 1
            assert all(call.trainable for call in calls)
            assert [(call.token_mode or {})["render"] for call in calls] == ["first", "bridge", "bridge"]

    asyncio.run(asyncio.wait_for(body(), 55))


def test_characters_of_several_tokens_are_whole() -> None:
    """A stream of llama.cpp leaves out each token that ends within a character, and it never has their logprobs."""

    async def body() -> None:
        weights = await find_weights(Path("/nowhere"), print)
        async with open_local_server(weights, print) as url, Upstream() as upstream:
            endpoint = Endpoint(url, weights.stem, engine="llamacpp")
            source = RenderingSource(TokenSettings(), endpoint, upstream, thinking=None)
            tokens = TokenConversations(source, print)
            turn = [{"role": "user", "content": "Ten horses."}, {"role": "assistant", "content": "🐴" * 10}]
            messages = [*turn * 3, turn[0]]
            chat = {"messages": messages, "stream": True, "temperature": 0.0}
            first = await ask(tokens, upstream, endpoint, 0, chat, 32)
            messages += [first.message, {"role": "user", "content": "Go on."}]
            second = await ask(tokens, upstream, endpoint, 1, {**chat, "messages": messages})
            whole = open_tokenizer(str(weights)).decode(first.completion_token_ids, skip_special_tokens=True)
            assert "🐴" in (text := first.message["content"])
            assert text == whole.strip()
            ids = first.prompt_token_ids + first.completion_token_ids
            assert second.prompt_token_ids[: len(ids)] == ids
            assert len(first.completion_token_ids) == first.usage["completion_tokens"]
            assert 0 < len(first.logprobs) < len(first.completion_token_ids)
            assert not first.trainable

    asyncio.run(asyncio.wait_for(body(), 55))
