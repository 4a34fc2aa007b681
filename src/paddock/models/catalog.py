"""From what a user writes as `--model` to a live endpoint. What a form needs is imported when it is used."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from paddock.config import HF_TOKEN, OPENAI_API_KEY, PADDOCK_MODEL_API_KEY
from paddock.errors import ConfigError
from paddock.loopback import is_loopback
from paddock.models.endpoint import Endpoint, parse_model_url
from paddock.models.listing import list_models
from paddock.protocol.redact import mask_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from paddock.models.endpoint import ModelUrl

HF_ROUTER = "https://router.huggingface.co/v1"
DEMO = "demo"
FORMS = (
    "use http(s)://host:port[/v1], vllm://org/repo, hf-router://org/repo:provider, "
    "demo, replay:FILE, local, local:FILE.gguf or local:NAME"
)
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)*(:[\w.-]+)?")


@asynccontextmanager
async def open_model(
    spec: str,
    *,
    name: str | None = None,
    api_key: str | None = None,
    vllm_url: str | None = None,
    hf_token: str | None = None,
    demo: Mapping[str, Any] | None = None,
    log: Callable[[str], None] | None = None,
) -> AsyncIterator[Endpoint]:
    """A live endpoint while the context is entered. `log` gets a line for each slow step and each choice. `demo` is
    the script of the model `demo`; None plays OpenCode's.

    http(s)://host[:port][/v1]     a server that runs; without `name`, the first model it lists
    vllm://org/repo                that model on the vLLM server at `vllm_url`
    hf-router://org/repo:provider  that model at Hugging Face, with `hf_token` or HF_TOKEN
    demo                           recorded answers that solve every shipped task, for a first look without a model
    replay:FILE                    a script or a recording, played by `paddock.models.replay`
    local                          a small model on this machine's processor
    local:FILE.gguf, local:NAME    the model in that file, or in one of that name that was downloaded before

    The key for a server is `api_key`, else PADDOCK_MODEL_API_KEY, else OPENAI_API_KEY; the last one is not
    sent in the clear to another machine.

    Raises ConfigError if the form cannot be used as written, ModelError if nothing answers there.
    """
    log = log or _ignore
    if spec.startswith(("http://", "https://")):
        yield await _server(spec, name, api_key, log)
    elif spec.startswith("vllm://"):
        yield _vllm(spec, name, api_key or PADDOCK_MODEL_API_KEY.read(), vllm_url)
    elif spec.startswith("hf-router://"):
        yield _hf_router(spec, name, hf_token or api_key or HF_TOKEN.read())
    elif spec == DEMO or spec.startswith("replay:"):
        from paddock.models.replay import ReplayServer
        from paddock.tasks.shipped import replay_file

        file = str(replay_file()) if spec == DEMO else spec.removeprefix("replay:")
        if not file:
            raise ConfigError("replay: names no file", hint=FORMS)
        async with ReplayServer(file if spec != DEMO or demo is None else dict(demo)) as server:
            engine = "openai" if server.script.engine == "text" else server.script.engine
            yield Endpoint(server.url, name or server.script.model, label=spec, engine=engine)
    elif spec == "local" or spec.startswith("local:"):
        from paddock.models.gguf_files import find_gguf, models_folder
        from paddock.models.local import check_installed, find_weights, open_local_server

        file = spec.removeprefix("local").removeprefix(":")
        if spec == "local:":
            raise ConfigError("local: names no file", hint=FORMS)
        check_installed()
        weights = find_gguf(file) if file else await find_weights(models_folder(), log)
        async with open_local_server(weights, log) as url:
            yield Endpoint(url, name or weights.stem, label=spec, engine="llamacpp")
    else:
        raise ConfigError(f"{mask_url(spec)!r} names no model", hint=FORMS)


async def _server(spec: str, name: str | None, api_key: str | None, log: Callable[[str], None]) -> Endpoint:
    server = parse_model_url(spec)
    if server.headers and api_key:
        raise ConfigError(f"{server.label} has a user and a key as well", hint="give one of them")
    key = None if server.headers else api_key or _key_for(server)
    if name is None:
        names = await list_models(server, key)
        name = names[0]
        others = f", the first of {len(names)} there" if len(names) > 1 else ""
        log(f"using the model {name} of {server.label}{others}")
    return Endpoint(server.url, name, key, server.headers, label=server.label)


def _key_for(server: ModelUrl) -> str | None:
    private = server.url.startswith("https://") or is_loopback(server.host)
    return PADDOCK_MODEL_API_KEY.read() or (OPENAI_API_KEY.read() if private else None)


def _vllm(spec: str, name: str | None, api_key: str | None, vllm_url: str | None) -> Endpoint:
    model = _repository(spec, "vllm://")
    if not vllm_url:
        raise ConfigError(f"{spec} needs the address of a vLLM server", hint="give vllm_url, as http://host:8000")
    server = parse_model_url(vllm_url)
    key = None if server.headers else api_key
    return Endpoint(server.url, name or model, key, server.headers, label=spec, engine="vllm")


def _hf_router(spec: str, name: str | None, token: str | None) -> Endpoint:
    model = _repository(spec, "hf-router://")
    if not token:
        raise ConfigError(f"{spec} needs a token of Hugging Face", hint="set HF_TOKEN or give hf_token")
    return Endpoint(HF_ROUTER, name or model, token, label=spec, engine="openai")


def _repository(spec: str, scheme: str) -> str:
    repository = spec.removeprefix(scheme)
    if _REPOSITORY.fullmatch(repository) is None:
        raise ConfigError(f"{mask_url(spec)!r} names no model", hint=FORMS)
    return repository


def _ignore(_: str) -> None:
    pass
