"""Finds and opens the tokenizer and the renderer of an endpoint's model, once per process."""

from __future__ import annotations

import asyncio
import threading
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.capture.errors import UpstreamFailure
from paddock.capture.tokenizer import TOKENIZER_SECONDS, UNUSABLE, post_to
from paddock.capture.tokens.tokenizer import HINT, TOKENIZER_FILE, check_installed, find_cached, open_tokenizer
from paddock.errors import ConfigError

if TYPE_CHECKING:
    from paddock.capture.engines import InferenceEngine
    from paddock.capture.settings import TokenSettings
    from paddock.capture.tokens.engine_tokenizer import EngineTokenizer
    from paddock.capture.tokens.rendering import Rendering
    from paddock.capture.upstream import Upstream
    from paddock.models.endpoint import Endpoint

FROM_ENGINE = "engine"
"""The `tokenizer` that means the inference engine's own."""
CACHED_RENDERINGS = 4
SAMPLE_TEXT = "Hello world, it's 2026: 12345 things cost $3.50!\n\n\tdef f(x):\n    return x**2\n"
"""Different tokenizers give different ids for it."""
_LOCK = threading.Lock()


class RenderingSource:
    """Opens the rendering of one endpoint when it is first needed."""

    def __init__(
        self, settings: TokenSettings, endpoint: Endpoint, upstream: Upstream, *, thinking: bool | None
    ) -> None:
        self.endpoint = endpoint
        self._settings = settings
        self._upstream = upstream
        self._thinking = thinking
        self._rendering: Rendering | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> Rendering:
        """The rendering. Raises ConfigError, or ModelError if the engine's tokenizer does not answer."""
        async with self._lock:
            if self._rendering is None:
                check_installed()
                self._rendering = await self._open()
            return self._rendering

    async def check(self) -> Rendering:
        """The rendering, for an endpoint that takes token ids and has the same tokenizer. Raises ConfigError."""
        engine = await self._upstream.detect_engine(self.endpoint)
        if engine.token_api is None:
            raise ConfigError(
                f"token mode needs vLLM, SGLang or llama.cpp; {self.endpoint.display_name} is {engine.name}",
                hint="leave --tokens out, or serve the model with one of them",
            )
        rendering = await self.open()
        await self._check_tokenizer(engine, rendering)
        return rendering

    async def _check_tokenizer(self, engine: InferenceEngine, rendering: Rendering) -> None:
        """Raises ConfigError if the engine has another tokenizer. One that cannot be asked is not checked."""
        if engine.tokenizer is None or rendering.tokenizer.is_remote:
            return
        post = post_to(self.endpoint, self._upstream)
        try:
            async with asyncio.timeout(TOKENIZER_SECONDS):
                ids = await engine.tokenizer.encode(post, self.endpoint.name, SAMPLE_TEXT)
        except UNUSABLE:
            return
        if ids != await asyncio.to_thread(rendering.tokenizer.encode, SAMPLE_TEXT):
            raise ConfigError(
                f"the tokenizer {rendering.tokenizer.name_or_path} is not that of {self.endpoint.display_name}: "
                "a text has other ids there",
                hint=f"give the tokenizer of the model that is served, or `{FROM_ENGINE}`",
            )

    async def _open(self) -> Rendering:
        source = self._settings.tokenizer
        if source is None:
            source = await self._find_source()
        if source != FROM_ENGINE:
            return await asyncio.to_thread(
                _open_local, source, self._settings.renderer, self.endpoint.name, self._thinking
            )
        from paddock.capture.tokens.rendering import open_rendering

        tokenizer = await self._open_engine_tokenizer()
        return await asyncio.to_thread(
            lambda: open_rendering(
                tokenizer, family=self._settings.renderer, model=self.endpoint.name, thinking=self._thinking
            )
        )

    async def _find_source(self) -> str:
        """The model's name if its tokenizer is on this machine, the engine's own file, or the engine."""
        name = self.endpoint.name
        if await asyncio.to_thread(is_here, name):
            return name
        engine = await self._upstream.detect_engine(self.endpoint)
        path = (await self._properties(engine)).get("model_path")
        if isinstance(path, str) and await asyncio.to_thread(is_here, path):
            try:
                await asyncio.to_thread(
                    _open_local, path, self._settings.renderer, self.endpoint.name, self._thinking
                )
            except ConfigError:
                return FROM_ENGINE
            return path
        return FROM_ENGINE

    async def _open_engine_tokenizer(self) -> EngineTokenizer:
        from paddock.capture.tokens.engine_tokenizer import EngineTokenizer

        engine = await self._upstream.detect_engine(self.endpoint)
        if engine.tokenizer is None:
            raise ConfigError(f"the engine {engine.name} has no tokenizer for token mode", hint=HINT)
        about = await self._properties(engine)
        template = about.get("chat_template")
        return EngineTokenizer(
            engine.tokenizer,
            post_to(self.endpoint, self._upstream),
            self.endpoint.name,
            asyncio.get_running_loop(),
            template=template if isinstance(template, str) else None,
            bos=about.get("bos_token") or None,
            eos=about.get("eos_token") or None,
        )

    async def _properties(self, engine: InferenceEngine) -> dict[str, Any]:
        """What llama.cpp says of itself; empty for other engines."""
        if engine.name != "llamacpp":
            return {}
        try:
            document = await self._upstream.get(self.endpoint, "/props", root=True)
        except UpstreamFailure:
            return {}
        return document if isinstance(document, dict) else {}


def is_here(name: str) -> bool:
    """Whether a tokenizer of this name is on this machine."""
    path = Path(name)
    is_file = (path / TOKENIZER_FILE).is_file() or (path.suffix == ".gguf" and path.is_file())
    return is_file or find_cached(name) is not None


def _open_local(source: str, family: str | None, model: str, thinking: bool | None) -> Rendering:
    with _LOCK:
        return _open_cached(source, family, model, thinking)


@lru_cache(CACHED_RENDERINGS)
def _open_cached(source: str, family: str | None, model: str, thinking: bool | None) -> Rendering:
    from paddock.capture.tokens.rendering import open_rendering

    return open_rendering(open_tokenizer(source), family=family, model=model, thinking=thinking)
