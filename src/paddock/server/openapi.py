"""The OpenAPI description of the HTTP routes, and a page that shows it without fetching anything."""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddock.sessions.spec import EnvironmentSpec

_JSON = "application/json"


def describe(spec: EnvironmentSpec, *, simulation: bool) -> dict[str, Any]:
    """OpenAPI 3.1 for one served environment."""
    schemas = spec.schemas()
    outcome = {
        "type": "object",
        "properties": {
            "observation": schemas["observation"],
            "reward": {"type": ["number", "null"]},
            "done": {"type": "boolean"},
            "metadata": {"type": ["object", "null"]},
        },
        "required": ["observation", "reward", "done"],
    }
    split = {"type": "object", "properties": {"split": {"type": "string"}}, "required": ["split"]}
    paths: dict[str, Any] = {}
    if simulation:
        arguments = {
            "type": "object",
            "properties": {
                "seed": {"type": ["integer", "null"], "minimum": 0},
                "episode_id": {"type": ["string", "null"], "maxLength": 255},
            },
        }
        action = {
            "type": "object",
            "properties": {
                "action": schemas["action"],
                "timeout_s": {"type": "number", "exclusiveMinimum": 0},
            },
            "required": ["action"],
        }
        paths["/reset"] = _post("Begin an episode. The answer names its session.", outcome, arguments, required=False)
        paths["/step"] = _post("Act in the episode that Session-Id names.", outcome, action)
        paths["/state"] = _get("The state of the episode that Session-Id names.", schemas["state"])
    paths |= {
        "/health": _get("Sessions, capacity, and whether environments can be built.", {"type": "object"}),
        "/metrics": _get("Counters for Prometheus.", {"type": "string"}, kind="text/plain"),
        "/metadata": _get("What the environment says of itself.", {"type": "object"}),
        "/schema": _get("JSON Schemas of action, observation and state.", {"type": "object"}),
        "/list_environments": _get("The name of the environment.", {"type": "array", "items": {"type": "string"}}),
        "/{environment}/splits": _get("Splits of the environment's tasks.", {"type": "array"}),
        "/{environment}/tasks": _post("All tasks of a split.", {"type": "object"}, split),
        "/{environment}/num_tasks": _post("How many tasks a split has.", {"type": "object"}, split),
        "/{environment}/task": _post("One task.", {"type": "object"}, split),
        "/{environment}/task_range": _post("Some tasks.", {"type": "object"}, split),
        "/mcp": _post("JSON-RPC 2.0: the Model Context Protocol, and openenv/session/*.", {"type": "object"}),
    }
    for path, operations in paths.items():
        if "{environment}" in path:
            parameter = {"name": "environment", "in": "path", "required": True, "schema": {"type": "string"}}
            for operation in operations.values():
                operation["parameters"] = [parameter]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"Paddock: {spec.name}",
            "version": "1.0.0",
            "description": "WebSocket clients use /ws, MCP clients /mcp.",
        },
        "paths": paths,
    }


def _get(summary: str, schema: dict[str, Any], kind: str = _JSON) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": _responses(schema, kind)}}


def _post(
    summary: str, schema: dict[str, Any], body: dict[str, Any] | None = None, *, required: bool = True
) -> dict[str, Any]:
    content = {_JSON: {"schema": body or {"type": "object"}}}
    request = {"required": required, "content": content}
    return {"post": {"summary": summary, "requestBody": request, "responses": _responses(schema, _JSON)}}


def _responses(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"200": {"description": "Done", "content": {kind: {"schema": schema}}}}


def page(document: dict[str, Any]) -> str:
    """The description as one HTML page: no script, no download."""
    sections = [
        f"<section><h2><b>{method.upper()}</b> {html.escape(path)}</h2><p>{html.escape(operation['summary'])}</p>"
        + "".join(_details(operation))
        + "</section>"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    title = html.escape(document["info"]["title"])
    return PAGE.format(title=title, intro=html.escape(document["info"]["description"]), sections="".join(sections))


def _details(operation: dict[str, Any]) -> list[str]:
    sections = []
    body = operation.get("requestBody", {}).get("content", {}).get(_JSON, {}).get("schema")
    if body:
        sections.append(_schema("request", body))
    answer = next(iter(operation["responses"]["200"]["content"].values()))["schema"]
    if answer != {"type": "object"}:
        sections.append(_schema("answer", answer))
    return sections


def _schema(name: str, schema: dict[str, Any]) -> str:
    text = html.escape(json.dumps(schema, indent=2))
    return f"<details><summary>{name}</summary><pre>{text}</pre></details>"


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }}
body {{ max-width: 52rem; margin: 2rem auto; padding: 0 1rem }}
section {{ border-top: 1px solid #8884; padding: .5rem 0 }}
h2 {{ font: 1rem ui-monospace, monospace; margin: .3rem 0 }} h2 b {{ color: #1769aa }}
p {{ margin: .2rem 0 }} pre {{ overflow: auto; background: #8881; padding: .6rem; border-radius: 4px }}
</style>
<h1>{title}</h1><p>{intro} The same as JSON: <a href="openapi.json">openapi.json</a>.</p>
{sections}
</html>"""
