"""`paddock probe URL`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from paddock.cli import note, print_json
from paddock.cli.interrupts import run_async
from paddock.config import PADDOCK_MODEL_API_KEY
from paddock.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from paddock.capture.probe import ProbeReport
    from paddock.capture.upstream import Upstream
    from paddock.models.endpoint import Endpoint

NOT_TRAINABLE = 1


@click.command("probe", epilog="URL: http://host:8000/v1, the base of an OpenAI-compatible server")
@click.argument("url")
@click.option("--model-name", help="Name of the model. Default: the first that the server lists.")
@click.option("--api-key", help="Its key. Better: PADDOCK_MODEL_API_KEY.")
@click.option("--timeout", default=120.0, show_default=True, help="Seconds that the call may take.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(url: str, model_name: str | None, api_key: str | None, timeout: float, as_json: bool) -> int:
    """Find out what a model endpoint returns: tokens, logprobs, or only text.

    Makes one short call. The exit code is 0 if rollouts on the endpoint can be trained on, 1 if not.
    """
    report = run_async(examine(base_of(url), model_name, api_key or PADDOCK_MODEL_API_KEY.read(), timeout))
    if as_json:
        print_json({**asdict(report), "trainable": report.trainable})
    else:
        print_report(report)
    return 0 if report.trainable else NOT_TRAINABLE


async def examine(url: str, name: str | None, api_key: str | None, timeout: float) -> ProbeReport:
    from paddock.capture.probe import probe
    from paddock.capture.settings import CaptureSettings
    from paddock.capture.upstream import Upstream
    from paddock.models.endpoint import Endpoint

    async with Upstream() as upstream:
        if name is None:
            name = await first_model(Endpoint(url, "", api_key=api_key, label=url), upstream)
        settings = CaptureSettings(attempts=2, call_timeout=timeout, unary_timeout=timeout)
        return await probe(Endpoint(url, name, api_key=api_key, label=url), upstream, settings)


async def first_model(endpoint: Endpoint, upstream: Upstream) -> str:
    from paddock.capture.engines import read_model_list
    from paddock.capture.errors import UpstreamFailure

    try:
        listed = read_model_list(await upstream.get(endpoint, "/models"))
    except UpstreamFailure as failure:
        raise ModelError(
            f"{endpoint.url} does not answer: {failure.message}", hint="is the server running?"
        ) from failure
    if not listed:
        raise ModelError(f"{endpoint.url} lists no models", hint="name one: --model-name NAME")
    return str(listed[0].get("id"))


def base_of(url: str) -> str:
    """The base URL of the API; `/v1` is added to a URL without a path."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is not a URL", hint=f"did you mean http://{url}?")
    base = url.rstrip("/").removesuffix("/chat/completions")
    return base if "/" in base.split("://", 1)[1] else base + "/v1"


def print_report(report: ProbeReport) -> None:
    counts = f"{report.prompt_ids} prompt ids, {report.completion_ids} completion ids, {report.logprobs} logprobs"
    rows = {
        "model": report.model,
        "engine": report.engine,
        "level": f"{report.level} ({counts})",
        "streaming": "yes" if report.streaming else "no, replayed when complete",
        "tools": ("used" if report.tool_calls else "taken, not used") if report.tools else "refused",
        "first token": f"{report.latency * 1000:.0f} ms",
        "token mode": "yes, with --tokens"
        if report.token_mode_problem is None
        else f"no: {report.token_mode_problem}",
        "trainable": "yes" if report.trainable else "no",
    }
    for name, value in rows.items():
        click.echo(f"{name:<12} {value}")
    for advice in report.advice:
        note(f"hint: {advice}")
