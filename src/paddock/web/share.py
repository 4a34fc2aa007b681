"""A rollout as one file that opens without a server: the page's own modules and the answers they would ask for.

The modules are put one behind another, each in a function of its own, and allowed by their hash. Data stands in
an element that no browser runs.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import TYPE_CHECKING, Any

from paddock.web import calls, detail, tokens, workdir
from paddock.web.answers import PageError, encode

if TYPE_CHECKING:
    import sqlite3

    from paddock.web.files import Assets
    from paddock.web.trail import Trail

MOST_BYTES = 24 * 1024 * 1024
"""Tokens and whole requests are left out once the data has this size."""
ENTRY = re.compile(r"""<script\b[^>]*\bsrc=["']([^"']+)["']""")
"""In the page: the module that begins everything."""
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


def page(assets: Assets, title: str, data: dict[str, Any]) -> bytes:
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
        f"<title>{_escaped(title)}</title>\n<style>{style}</style>\n</head>\n"
        f"<body{body_attributes(assets)}>\n{body(assets)}\n"
        f'<script type="application/json" id="{DATA}">{harmless(data)}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    ).encode()


def collected(connection: sqlite3.Connection, trail: Trail, about: dict[str, Any]) -> dict[str, Any]:
    """The answers of the API that a page about one rollout asks for, by their paths below `api/`."""
    here = f"rollouts/{trail.id}"
    listed = calls.listed(connection, trail)
    whole = {**detail.whole(connection, trail), "live": False}
    answers: dict[str, Any] = {
        "about": about,
        "rollouts": {"total": 1, "offset": 0, "rows": [whole | {"files": []}]},
        here: whole,
        f"{here}/transcript": {"items": trail.items, "next": len(trail.items), "done": True},
        f"{here}/calls": {"calls": listed},
    }
    size = len(encode(answers))
    left_out: list[str] = []
    if whole["has_workdir"]:
        size = _add(answers, f"{here}/changes", workdir.changes(connection, trail), size, left_out)
    for row in listed:
        place = f"{here}/calls/{row['id']}"
        many = max(1, row["completion_tokens"])
        size = _add(
            answers, f"{place}/tokens/completion",
            tokens.page(connection, trail, row["id"], "completion", 0, many), size, left_out,
        )  # fmt: skip
        new = max(1, row["prompt_tokens"] - row["shared_tokens"])
        size = _add(
            answers, f"{place}/tokens/prompt",
            tokens.page(connection, trail, row["id"], "prompt", row["shared_tokens"], new), size, left_out,
        )  # fmt: skip
        size = _add(answers, place, _lighter(calls.whole(connection, trail, row["id"])), size, left_out)
    return {"kind": "paddock-share", "version": 1, "id": trail.id, "left_out": left_out, "answers": answers}


def _lighter(call: dict[str, Any]) -> dict[str, Any]:
    """Without the second copy of the conversation, where the dialect is chat anyway."""
    return {**call, "raw_request": None} if call["dialect"] == "chat" else call


def _add(answers: dict[str, Any], path: str, document: Any, size: int, left_out: list[str]) -> int:
    weight = len(encode(document))
    if size + weight > MOST_BYTES:
        left_out.append(path)
        return size
    answers[path] = document
    return size + weight


def harmless(data: Any) -> str:
    """JSON that ends no element and begins no comment."""
    text = encode(data).decode()
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
    """What stands in the body of the page, without its scripts."""
    html = assets.get("index.html").content.decode()
    found = re.search(r"<body[^>]*>(.*)</body>", html, re.DOTALL)
    inner = found.group(1) if found else ""
    return re.sub(r"<script\b[^>]*>.*?</script>", "", inner, flags=re.DOTALL).strip()


def body_attributes(assets: Assets) -> str:
    found = re.search(r"<body([^>]*)>", assets.get("index.html").content.decode())
    return found.group(1) if found else ""


# -- modules --------------------------------------------------------------------------------------


def bundle(modules: dict[str, str], entry: str) -> str:
    """Our modules as one, those that others import first. Raises PageError for what it cannot join."""
    ordered: list[str] = []
    _visit(modules, entry, ordered, [])
    parts = ['"use strict";', "const $m = {};"]
    parts += [_wrapped(name, modules) for name in ordered]
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
        _visit(modules, _resolved(name, path), ordered, [*above, name])
    ordered.append(name)


def _imported(source: str) -> list[str]:
    found = [match["path"] for match in IMPORT.finditer(source)]
    return found + [match["path"] for match in EXPORTS.finditer(source) if match["path"]]


def _resolved(name: str, path: str) -> str:
    parts = name.split("/")[:-1]
    for step in path.split("/"):
        if step == "..":
            parts = parts[:-1]
        elif step != ".":
            parts.append(step)
    return "/".join(parts)


def _wrapped(name: str, modules: dict[str, str]) -> str:
    """A module as a function that returns what it exports."""
    source, exported = modules[name], {}

    def take_import(match: re.Match[str]) -> str:
        target = f'$m["{_resolved(name, match["path"])}"]'
        return "\n".join(_bound(match["names"], target))

    def take_export(match: re.Match[str]) -> str:
        exported[match["name"]] = match["name"]
        return f"{match['what']} {match['name']}"

    def take_list(match: re.Match[str]) -> str:
        source_of = f'$m["{_resolved(name, match["path"])}"].' if match["path"] else ""
        for own, shown in _pairs(match["names"]):
            exported[shown] = source_of + own
        return ""

    source = IMPORT.sub(take_import, source)
    source = EXPORTED.sub(take_export, source)
    source = EXPORTS.sub(take_list, source)
    if DEFAULT.search(source):
        source = DEFAULT.sub("const $default = ", source, count=1)
        exported["default"] = "$default"
    returned = ", ".join(f"get {shown}() {{ return {own}; }}" for shown, own in exported.items())
    return f'$m["{name}"] = (() => {{\n{source}\nreturn {{ {returned} }};\n}})();'


def _bound(names: str | None, target: str) -> list[str]:
    """The names of an import as constants."""
    if not names:
        return []
    lines = []
    rest = names.strip()
    listed = re.search(r"\{([^}]*)\}", rest)
    if listed:
        pairs = ", ".join(own if own == shown else f"{own}: {shown}" for own, shown in _pairs(listed.group(1)))
        lines.append(f"const {{ {pairs} }} = {target};")
        rest = rest.replace(listed.group(0), "")
    for part in (each.strip() for each in rest.split(",")):
        if part.startswith("*"):
            lines.append(f"const {part.rpartition(' ')[2]} = {target};")
        elif part:
            lines.append(f"const {part} = {target}.default;")
    return lines


def _pairs(names: str) -> list[tuple[str, str]]:
    found = []
    for part in (each.strip() for each in names.split(",")):
        if part:
            own, _, shown = part.partition(" as ")
            found.append((own.strip(), shown.strip() or own.strip()))
    return found


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
