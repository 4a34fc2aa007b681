"""A verifier as it is sent to the plane: which function is meant, what it is given, and the bundle with its source.

The source is read, never run: it runs at the plane, beside the instance it looks at.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import pickle
import zipfile
from dataclasses import dataclass
from typing import Any

from paddock.fleet.errors import VerifierInvalid

USUAL_NAMES = ("verify", "verifier", "validate", "evaluate", "grade")
USUAL_BEGINNINGS = ("verify", "validate")
SECONDS = 30
REGION = "us-west-1"
LONG_AGO = (1980, 1, 1, 0, 0, 0)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """The function to call, and which keyword arguments it takes; None when the source could not be read here."""

    name: str
    parameters: frozenset[str] | None

    def takes(self, parameter: str) -> bool:
        return self.parameters is None or parameter in self.parameters or "**" in self.parameters


def entry_point(source: str, named: str | None = None) -> EntryPoint:
    """The function that is the verifier: the one that is `named`, decorated as such, usually named, or alone.

    Raises VerifierInvalid when there is none, or when several could be meant.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        if named:
            return EntryPoint(named, None)
        raise VerifierInvalid(f"the verifier cannot be parsed: {error}") from error
    functions = {node.name: node for node in tree.body if isinstance(node, Function)}
    name = named or _chosen(functions)
    if name not in functions:
        known = ", ".join(functions) or "none"
        raise VerifierInvalid(f"the verifier has no function {name!r}", hint=f"there are: {known}")
    return EntryPoint(name, _parameters(functions[name]))


def _chosen(functions: dict[str, Function]) -> str:
    if not functions:
        raise VerifierInvalid("the verifier defines no function")
    choices = (
        [name for name, node in functions.items() if _is_decorated(node)],
        [name for name in USUAL_NAMES if name in functions][:1],
        list(functions),
        [name for name in functions if name.startswith(USUAL_BEGINNINGS)],
    )
    for found in choices:
        if len(found) == 1:
            return found[0]
    raise VerifierInvalid(
        f"the verifier defines {', '.join(functions)}: which one is meant is not clear",
        hint="name it in the task's verifier_function",
    )


def _is_decorated(node: Function) -> bool:
    """Whether it carries `@verifier` or `@verifier(...)`."""
    targets = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return any(
        (isinstance(each, ast.Name) and each.id == "verifier")
        or (isinstance(each, ast.Attribute) and each.attr == "verifier")
        for each in targets
    )


def _parameters(node: Function) -> frozenset[str]:
    arguments = node.args
    names = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return frozenset(names | ({"**"} if arguments.kwarg is not None else set()))


def execute_body(
    *, key: str, source: str, entry: EntryPoint, instance_id: str, arguments: dict[str, Any], seconds: int = SECONDS
) -> dict[str, Any]:
    """The body of a request that runs a verifier. `arguments` are keyword arguments of plain data."""
    bundle = _bundle(source)
    placeholder = {"env": instance_id}
    # Plain data pickles to the same stream that cloudpickle would write.
    packed = pickle.dumps({"args": (None, placeholder), "kwargs": arguments}, protocol=4)
    return {
        "key": key,
        "sha256": hashlib.sha256(bundle).hexdigest(),
        "args": base64.b64encode(packed).decode(),
        "args_array": [placeholder],
        "function_name": entry.name,
        "timeout": seconds,
        "region": REGION,
        "bundle": base64.b64encode(bundle).decode(),
    }


def _bundle(source: str) -> bytes:
    """The same bytes for the same source, so that the plane recognises it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (("requirements.txt", "fleet-python\n"), ("verifier.py", source)):
            archive.writestr(zipfile.ZipInfo(name, LONG_AGO), text)
    return out.getvalue()
