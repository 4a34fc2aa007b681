"""`openenv:PLACE[@VENV]`: an OpenEnv environment as a target.

PLACE is `pkg.mod:Class`, a module whose app is to be served, or a folder with `openenv.yaml`. A class that can be
imported here runs in this process; everything else in a process of its own, under the interpreter of VENV (a folder,
or a path to python) or, without one, under this one.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from paddock.adapters.child.hosted import environment_class
from paddock.adapters.child.process import Process, interpreter
from paddock.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable

LOADER = Path(__file__).with_name("hosted.py")


def load(rest: str) -> tuple[Callable[[], Any], str]:
    """Raises TargetError."""
    place, at, venv = rest.rpartition("@")
    place, named = (place, interpreter(venv)) if at else (rest, None)
    name = _name(place)
    if named is None and ":" in place and _is_here("openenv"):
        from paddock.targets import class_in_module

        return typed(class_in_module(place)), name
    if named is None and not _is_here("openenv"):
        raise TargetError(
            f"openenv:{place} needs the openenv package, which is not installed here",
            hint=f"say where it is: openenv:{place}@PATH/TO/VENV, or pip install openenv",
        )
    process = Process(named or sys.executable, LOADER, place)
    return environment_class(process, process.start()), name


def typed(made: Callable[[], Any]) -> Callable[[], Any]:
    """A class that names its types only in its methods' annotations, with these where a server looks for them."""
    if not isinstance(made, type) or hasattr(made, "action_type") or _is_parametrized(made):
        return made
    found: dict[str, Any] = {}
    for attribute, method, annotation in (("action", "step", "action"), ("observation", "reset", "return")):
        try:
            written = get_type_hints(getattr(made, method)).get(annotation)
        except (AttributeError, NameError, TypeError):
            continue
        if isinstance(written, type) and issubclass(written, BaseModel):
            found[f"{attribute}_type"] = written
    return type(made.__name__, (made,), {"__module__": made.__module__, "__doc__": made.__doc__, **found})


def _is_parametrized(made: type) -> bool:
    written = (each for base in made.__mro__ for each in vars(base).get("__orig_bases__", ()))
    return any(
        getattr(get_origin(each), "__name__", "") == "Environment" and isinstance(get_args(each)[0], type)
        for each in written
    )


def _is_here(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _name(place: str) -> str:
    if ":" in place:
        return place.rpartition(":")[2].lower()
    parts = place.replace("/", ".").rstrip(".").split(".")
    known = [part for part in parts if part not in ("server", "app")]
    return known[-1] if known else "openenv"
