"""`openenv:PLACE[@VENV]`: an OpenEnv environment as a target.

PLACE is `pkg.mod:Class`, a module whose app is to be served, or a folder with `openenv.yaml`. Without VENV it runs in
this process. With VENV (a folder, or a path to python) it runs in a process of its own under that interpreter, unless
the whole server could move there: see `moving`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from paddock.adapters.child.hosted import environment_class
from paddock.errors import TargetError
from paddock.sessions.isolation.process import Process, interpreter

if TYPE_CHECKING:
    from collections.abc import Callable

LOADER = Path(__file__).with_name("hosted.py")


def load(rest: str) -> tuple[Callable[[], Any], str]:
    """Raises TargetError."""
    place, at, venv = rest.rpartition("@")
    place, named = (place, interpreter(venv)) if at else (rest, None)
    name = _name(place)
    if named is not None:
        process = Process(named, LOADER, place)
        about = process.start()
        return environment_class(process, about), about.get("called") or name
    if importlib.util.find_spec("openenv") is None:
        raise TargetError(
            f"openenv:{place} needs the openenv package, which is not installed here",
            hint=f"say where it is: openenv:{place}@PATH/TO/VENV, or pip install openenv",
        )
    if ":" not in place:
        given = from_app(place)
        return given, given.name or name
    from paddock.targets import class_in_module

    return typed(class_in_module(place)), name


@dataclass(frozen=True, slots=True)
class Given:
    """What an app gives to `create_app`: something that makes environments, and their types."""

    make: Callable[[], Any]
    action_type: Any
    observation_type: Any
    state_type: Any
    name: str | None = None
    """How the app calls its environment, if it does."""

    def __call__(self) -> Any:
        return self.make()


def from_app(place: str) -> Given:
    """What the app of a folder or a module serves. Raises TargetError."""
    hosted: Any = importlib.import_module("paddock.adapters.openenv.hosted")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return Given(*(hosted.from_folder(place) if Path(place).is_dir() else hosted.from_app(place)))
    except Exception as error:
        hint = getattr(error, "hint", "") or "does it run under OpenEnv's own server?"
        raise TargetError(f"{place!r} cannot be loaded: {type(error).__name__}: {error}", hint=hint) from error


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


def _name(place: str) -> str:
    if ":" in place:
        return place.rpartition(":")[2].lower()
    parts = place.replace("/", ".").rstrip(".").split(".")
    known = [part for part in parts if part not in ("server", "app")]
    return known[-1] if known else "openenv"
