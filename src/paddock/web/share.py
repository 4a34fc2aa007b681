"""A rollout as one HTML file that opens without a server: the page's modules and the API answers that they request.

The modules are bundled into one script, each wrapped in a function, which the content security policy allows by its
hash. The data is in an element that no browser executes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import TYPE_CHECKING, Any

from paddock.web import branches, call_changes, calls, detail, tokens
from paddock.web.responses import PageError, encode_json

if TYPE_CHECKING:
    import sqlite3

    from paddock.web.loaded_rollout import LoadedRollout
    from paddock.web.static_files import Assets

MAX_BYTES = 24 * 1024 * 1024
"""Tokens and whole requests are left out once the data has this size."""
ENTRY = re.compile(r"""<script\b[^>]*\bsrc=["']([^"']+)["']""")
"""The script tag of the page: its entry module."""
DATA = "paddock-data"
IMPORT = re.compile(
    r"""^import\s+(?:(?P<names>[\w*{}\s,$]+?)\s+from\s+)?["'](?P<path>[^"']+)["'];?[ \t]*$""", re.MULTILINE
)
EXPORTED = re.compile(
    r"^export\s+(?P<what>(?:async\s+)?function\*?|class|const|let|var)\s+(?P<name>[A-Za-z_$][\w$]*)", re.MULTILINE
)
EXPORTS = re.compile(
    r"^export\s*\{(?P<names>[^}]*)\}(?:\s*from\s*[\"'](?P<path>[^\"']+)[\"'])?;?[ \t]*$", re.MULTILINE
)
DEFAULT = re.compile(r"^export\s+default\s+", re.MULTILINE)


def render_page(assets: Assets, title: str, data: dict[str, Any]) -> bytes:
    """The whole file."""
    entry = ENTRY.search(assets.get("index.html").content.decode())
    modules = {name: asset.content.decode() for name, asset in assets.all().items() if name.endswith(".js")}
    script = bundle(modules, entry.group(1)) if entry else ""
    style = "\n".join(asset.content.decode() for name, asset in assets.all().items() if name.endswith(".css"))
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}';"
        " img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return (
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{_escape_html(title)}</title>\n<style>{style}</style>\n</head>\n"
        f"<body{body_attributes(assets)}>\n{body(assets)}\n"
        f'<script type="application/json" id="{DATA}">{escape_json(data)}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    ).encode()


def collect_answers(connection: sqlite3.Connection, rollout: LoadedRollout, about: dict[str, Any]) -> dict[str, Any]:
    """The answers of the API that a page about one rollout asks for, by their paths below `api/`."""
    base = f"rollouts/{rollout.id}"
    call_rows = calls.list_calls(connection, rollout)
    whole = {**detail.describe(connection, rollout), "live": False}
    answers: dict[str, Any] = {
        "about": about,
        "rollouts": {"total": 1, "offset": 0, "rows": [whole | {"files": []}]},
        base: whole,
        f"{base}/transcript": {"items": rollout.items, "next": len(rollout.items), "done": True},
        f"{base}/calls": {"calls": call_rows},
        f"{base}/tools": {"tools": [span.to_json() for span in rollout.tools.spans]},
        f"{base}/tree": branches.describe_tree(connection, rollout),
    }
    size = len(encode_json(answers))
    left_out: list[str] = []
    if whole["has_workdir"]:
        size = _add(answers, f"{base}/changes", detail.file_changes(connection, rollout), size, left_out)
    if whole["has_snapshots"]:
        listed = call_changes.list_call_changes(connection, rollout)
        size = _add(answers, f"{base}/snapshots", listed, size, left_out)
        for name in (row["call"] for row in listed["rows"] if row["changes"]):
            changes = call_changes.describe_call_changes(connection, rollout, name)
            size = _add(answers, f"{base}/calls/{name}/changes", changes, size, left_out)
    for row in call_rows:
        path = f"{base}/calls/{row['id']}"
        sampled = max(1, row["completion_tokens"])
        size = _add(
            answers, f"{path}/tokens/completion",
            tokens.token_page(connection, rollout, row["id"], "completion", 0, sampled), size, left_out,
        )  # fmt: skip
        new = max(1, row["prompt_tokens"] - row["shared_tokens"])
        size = _add(
            answers, f"{path}/tokens/prompt",
            tokens.token_page(connection, rollout, row["id"], "prompt", row["shared_tokens"], new), size, left_out,
        )  # fmt: skip
        size = _add(
            answers, path, _without_duplicate(calls.describe_call(connection, rollout, row["id"])), size, left_out
        )
    return {"kind": "paddock-share", "version": 1, "id": rollout.id, "left_out": left_out, "answers": answers}


def _without_duplicate(call: dict[str, Any]) -> dict[str, Any]:
    """Without the second copy of the conversation, where the dialect is chat anyway."""
    return {**call, "raw_request": None} if call["dialect"] == "chat" else call


def _add(answers: dict[str, Any], path: str, document: Any, size: int, left_out: list[str]) -> int:
    added = len(encode_json(document))
    if size + added > MAX_BYTES:
        left_out.append(path)
        return size
    answers[path] = document
    return size + added


def escape_json(data: Any) -> str:
    """JSON that cannot end the script element or begin a comment."""
    text = encode_json(data).decode()
    for sign, code in (
        ("<", "\\u003c"),
        (">", "\\u003e"),
        ("&", "\\u0026"),
        ("\u2028", "\\u2028"),
        ("\u2029", "\\u2029"),
    ):
        text = text.replace(sign, code)
    return text


def body(assets: Assets) -> str:
    """The content of the page's body, without its scripts."""
    html = assets.get("index.html").content.decode()
    match = re.search(r"<body[^>]*>(.*)</body>", html, re.DOTALL)
    inner = match.group(1) if match else ""
    return re.sub(r"<script\b[^>]*>.*?</script>", "", inner, flags=re.DOTALL).strip()


def body_attributes(assets: Assets) -> str:
    match = re.search(r"<body([^>]*)>", assets.get("index.html").content.decode())
    return match.group(1) if match else ""


# -- modules --------------------------------------------------------------------------------------


def bundle(modules: dict[str, str], entry: str) -> str:
    """Our modules as one script, imported ones first. Raises PageError for what cannot be joined."""
    ordered: list[str] = []
    _visit(modules, entry, ordered, [])
    parts = ['"use strict";', "const $m = {};"]
    parts += [_wrap_module(name, modules) for name in ordered]
    script = "\n".join(parts) + "\n"
    if re.search(r"</script|<!--", script, re.IGNORECASE):
        script = re.sub(r"</(script)", r"<\\/\1", script, flags=re.IGNORECASE).replace("<!--", "<\\!--")
    return script


def _visit(modules: dict[str, str], name: str, ordered: list[str], above: list[str]) -> None:
    if name in ordered:
        return
    if name in above:
        raise PageError(f"the modules import each other in a circle: {' → '.join([*above, name])}")
    if name not in modules:
        raise PageError(f"{above[-1] if above else 'the page'} imports {name}, which is not there")
    for path in _imported(modules[name]):
        _visit(modules, _resolve(name, path), ordered, [*above, name])
    ordered.append(name)


def _imported(source: str) -> list[str]:
    imports = [match["path"] for match in IMPORT.finditer(source)]
    return imports + [match["path"] for match in EXPORTS.finditer(source) if match["path"]]


def _resolve(name: str, path: str) -> str:
    parts = name.split("/")[:-1]
    for step in path.split("/"):
        if step == "..":
            parts = parts[:-1]
        elif step != ".":
            parts.append(step)
    return "/".join(parts)


def _wrap_module(name: str, modules: dict[str, str]) -> str:
    """A module as a function that returns what it exports."""
    source, exported = modules[name], {}

    def take_import(match: re.Match[str]) -> str:
        target = f'$m["{_resolve(name, match["path"])}"]'
        return "\n".join(_bind_names(match["names"], target))

    def take_export(match: re.Match[str]) -> str:
        exported[match["name"]] = match["name"]
        return f"{match['what']} {match['name']}"

    def take_list(match: re.Match[str]) -> str:
        source_of = f'$m["{_resolve(name, match["path"])}"].' if match["path"] else ""
        for own, alias in _parse_names(match["names"]):
            exported[alias] = source_of + own
        return ""

    source = IMPORT.sub(take_import, source)
    source = EXPORTED.sub(take_export, source)
    source = EXPORTS.sub(take_list, source)
    if DEFAULT.search(source):
        source = DEFAULT.sub("const $default = ", source, count=1)
        exported["default"] = "$default"
    returned = ", ".join(f"get {alias}() {{ return {own}; }}" for alias, own in exported.items())
    return f'$m["{name}"] = (() => {{\n{source}\nreturn {{ {returned} }};\n}})();'


def _bind_names(names: str | None, target: str) -> list[str]:
    """The names of an import as constants."""
    if not names:
        return []
    lines = []
    rest = names.strip()
    listed = re.search(r"\{([^}]*)\}", rest)
    if listed:
        pairs = ", ".join(own if own == alias else f"{own}: {alias}" for own, alias in _parse_names(listed.group(1)))
        lines.append(f"const {{ {pairs} }} = {target};")
        rest = rest.replace(listed.group(0), "")
    for part in (each.strip() for each in rest.split(",")):
        if part.startswith("*"):
            lines.append(f"const {part.rpartition(' ')[2]} = {target};")
        elif part:
            lines.append(f"const {part} = {target}.default;")
    return lines


def _parse_names(names: str) -> list[tuple[str, str]]:
    pairs = []
    for part in (each.strip() for each in names.split(",")):
        if part:
            own, _, alias = part.partition(" as ")
            pairs.append((own.strip(), alias.strip() or own.strip()))
    return pairs


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escape_html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
