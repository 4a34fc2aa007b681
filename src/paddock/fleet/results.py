"""What a tool answered, as a value that an agent can be shown.

One text is read as JSON if it is JSON; images become `image_url` parts as chat models take them; several texts stay
a list. A result that says it is an error becomes `{"error": …}`, which is not the same as a call that failed.
"""

from __future__ import annotations

import json
from typing import Any, Never

import orjson

NO_IMAGE = "Screenshot capture failed (null image)"
FAILED = "Tool execution failed"


def extract(result: dict[str, Any]) -> Any:
    """The value of a `tools/call` result."""
    blocks = [block for block in result.get("content") or [] if isinstance(block, dict)]
    structured = result.get("structuredContent", result.get("structured_content"))
    if result.get("isError") or result.get("is_error"):
        return {"error": next((text for block in blocks if (text := _text(block))), None) or FAILED}
    if any(block.get("type") == "image" for block in blocks):
        images = [_image(block) for block in blocks if block.get("type") == "image"]
        return [*({"type": "text", "text": text} for block in blocks if (text := _text(block))), *images]
    texts = [text for block in blocks if (text := _text(block)) is not None]
    if len(texts) == 1:
        return _parsed(texts[0])
    if texts:
        return texts
    return structured if structured is not None else {}


def error_of(value: Any) -> str | None:
    """What a tool's value says went wrong, or None."""
    if not isinstance(value, dict):
        return None
    if value.get("error"):
        return _said(value["error"])
    if value.get("status") == "failed" or value.get("isError"):
        return _said(value.get("message") or FAILED)
    return None


def _said(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


def _text(block: dict[str, Any]) -> str | None:
    """The text of a block; None for an image."""
    kind = block.get("type")
    if kind == "text":
        return str(block.get("text", ""))
    if kind == "resource" and isinstance(block.get("resource"), dict):
        resource = block["resource"]
        return str(resource["text"]) if "text" in resource else f"[resource {resource.get('uri', 'without address')}]"
    if kind == "resource_link":
        return f"[resource {block.get('uri', 'without address')}]"
    if kind == "audio":
        return f"[audio {block.get('mimeType') or block.get('mime_type') or 'of unknown type'}]"
    return None


def _image(block: dict[str, Any]) -> dict[str, Any]:
    data = block.get("data")
    if not data:
        return {"type": "text", "text": NO_IMAGE}
    kind = block.get("mimeType") or block.get("mime_type") or "image/png"
    # Some servers send the whole data URL where the base64 text belongs.
    url = data if str(data)[:5].lower() == "data:" else f"data:{kind};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _parsed(text: str) -> Any:
    try:
        # The slow reader keeps integers of any length as they are.
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, dict) and "base64_image" in value:
        image = value["base64_image"]
        return [_image({"data": image})] if image else NO_IMAGE
    return value


def _refuse(text: str) -> Never:
    """NaN and infinities are not JSON: a text with one stays a text."""
    raise ValueError(text)
