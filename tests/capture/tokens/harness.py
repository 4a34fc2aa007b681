"""A proxy in token mode in front of a `TokenEngine`, and what must hold of everything that it stores."""

import atexit
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from capture.harness import ProxyUnderTest, start_proxy
from capture.token_engine import CHATML, SPECIAL, Reply, TokenEngine, decode, write_tokenizer
from paddock.capture.settings import TokenSettings
from paddock.capture.trace import Call, Level

LISTING = "<think>\nI should look at the rollouts first.\n</think>\n\nListing the files now.\n"
SYSTEM = {"role": "system", "content": "You are an agent."}


@cache
def tokenizer_folder(template: str | None = None, special: tuple[str, ...] = SPECIAL) -> str:
    folder = mkdtemp(prefix="paddock-tokenizer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_tokenizer(Path(folder), template=template, special=special)


@asynccontextmanager
async def token_proxy(
    answer: Callable[[str, int], Reply | str],
    engine: str = "vllm",
    *,
    family: str | None = "qwen3",
    tokenizer: str | None = None,
    **changes: Any,
) -> AsyncIterator[ProxyUnderTest]:
    """`changes` are settings, or fields of the engine."""
    options = {
        name: changes.pop(name)
        for name in ("tokens_per_event", "cumulative", "missing_path", "special", "breaks")
        if name in changes
    }
    template = CHATML if family == "default" else None
    source = tokenizer or tokenizer_folder(template, options.get("special", SPECIAL))
    model: Any = TokenEngine(answer, engine, **options)
    async with start_proxy(model, tokens=TokenSettings(source, family), **changes) as proxy:
        yield proxy


async def send(proxy: ProxyUnderTest, messages: list[dict[str, Any]], **changes: Any) -> Call:
    """One call of the agent. Returns it when it was stored."""
    before = len(proxy.capture.calls)
    await proxy.chat(messages=messages, **changes)
    await proxy.wait_until(lambda: len(proxy.capture.calls) > before and proxy.capture.calls[-1] in proxy.recorded)
    return proxy.capture.calls[-1]


def check_ids(proxy: ProxyUnderTest) -> None:
    """The ids that the engine got and sampled are the ids that are stored."""
    engine: Any = proxy.model
    calls = [call for call in proxy.capture.calls if call.error is None]
    assert [call.prompt_token_ids for call in calls] == [each.prompt for each in engine.calls]
    assert [call.completion_token_ids for call in calls] == [each.sampled for each in engine.calls]
    assert {call.level for call in calls} <= {Level.TOKENS}
    assert all(call.trainable for call in calls)


def continues(call: Call, earlier: Call) -> bool:
    """Whether a prompt begins with all ids of an earlier call."""
    ids = earlier.prompt_token_ids + earlier.completion_token_ids
    return call.prompt_token_ids[: len(ids)] == ids


def prompt_text(call: Call, special: tuple[str, ...] = SPECIAL) -> str:
    return decode(call.prompt_token_ids, special)
