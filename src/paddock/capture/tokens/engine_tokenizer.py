"""The tokenizer of an inference engine, asked over HTTP: for a model whose tokenizer is not on this machine.

Renderers call a tokenizer synchronously, on a thread; each call waits for a request on the event loop.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from paddock.capture.tokens.tokenizer import TextTokenizer
from paddock.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from paddock.capture.engines import Post, TokenizerApi

Result = TypeVar("Result")
ANSWER_SECONDS = 30.0


class EngineTokenizer(TextTokenizer):
    """Use it on a thread, never on the event loop."""

    is_remote: ClassVar[bool] = True

    def __init__(
        self, api: TokenizerApi, post: Post, model: str, loop: asyncio.AbstractEventLoop, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self._api = api
        self._post = post
        self._loop = loop
        self._ids: dict[str, int | None] = {}

    def encode(self, text: str, **options: Any) -> list[int]:
        return self._wait(self._api.encode(self._post, self.name_or_path, text)) if text else []

    def decode(self, token_ids: Sequence[int] | int, **options: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._wait(self._api.decode(self._post, self.name_or_path, ids)) if ids else ""

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """A text that is several tokens is no token: then it is None."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        if tokens not in self._ids:
            ids = self.encode(tokens)
            self._ids[tokens] = ids[0] if len(ids) == 1 else None
        return self._ids[tokens]

    def _wait(self, answer: Awaitable[Result]) -> Result:
        async def bounded() -> Result:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await answer

        try:
            return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result()
        except (TimeoutError, KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"the engine's tokenizer does not answer as expected: {type(error).__name__}: {error}",
                hint="give the folder of the model's tokenizer.json as tokenizer",
            ) from error
