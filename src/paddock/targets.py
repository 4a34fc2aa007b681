"""Finding the environment that a TARGET names.

A target is a shipped name (`echo`), a class in a module (`pkg.mod:Class`), a class in a file
(`path/to/file.py:Class`), or an environment of another ecosystem (`gymnasium:ID`, `openenv:…`, `mcp:…`).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock import adapters
from paddock.envs import SHIPPED
from paddock.errors import PaddockError, TargetError

if TYPE_CHECKING:
    from collections.abc import Callable

FORMS = ", ".join(
    ["a shipped name", "pkg.mod:Class", "path/to/file.py:Class", *(form for _, form in adapters.TARGETS.values())]
)


def load_target(target: str) -> tuple[Callable[[], Any], str]:
    """The class or factory that `target` names, and the name to serve it under."""
    if target in SHIPPED:
        return class_in_module(SHIPPED[target]), target
    if adapters.is_target(target):
        return adapters.load(target)
    place, colon, attribute = target.rpartition(":")
    if target.endswith(".py"):
        raise _classless(target)
    if not colon or not place:
        close = difflib.get_close_matches(target, SHIPPED, 1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        shipped = ", ".join(SHIPPED)
        raise TargetError(f"no environment is called {target!r}", hint=f"{meant}shipped: {shipped}; or give {FORMS}")
    if place.endswith(".py"):
        return _attribute(_file_module(Path(place)), attribute, target), attribute.lower()
    return class_in_module(target), attribute.lower()


def environment_of(target: str) -> Callable[[], Any]:
    """The class or factory alone: for a process that needs the same environment. Raises TargetError."""
    return load_target(target)[0]


def class_in_module(target: str) -> Callable[[], Any]:
    """The class or factory that `pkg.mod:Class` names. Raises TargetError."""
    place, _, attribute = target.rpartition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or place
        hint = (
            f"is the package installed here? targets are {FORMS}"
            if place.startswith(missing)
            else f"the target imports {missing!r}, which is not installed: pip install it first"
        )
        raise TargetError(f"cannot import {place!r}: no module named {missing!r}", hint=hint) from error
    except (Exception, SystemExit) as error:
        raise _failed_import(place, error) from error
    return _attribute(module, attribute, target)


def _classless(path: str) -> TargetError:
    """What to say of a file that is given without a class."""
    module = _file_module(Path(path))
    named = " or ".join(f"{path}:{name}" for name in _environments(module)) or f"{path}:Class"
    return TargetError(f"{path!r} is a file, not an environment", hint=f"name the class: {named}")


def _failed_import(place: str, error: BaseException) -> TargetError:
    if isinstance(error, SystemExit):
        message = f"{place!r} ended with sys.exit({error.code!r}) while it was imported"
        return TargetError(message, hint="put what it runs under if __name__ == '__main__'")
    message = f"importing {place!r} failed: {type(error).__name__}: {error}"
    return TargetError(message, hint="run python on it alone to see where")


def _file_module(path: Path) -> Any:
    if not path.is_file():
        raise TargetError(f"there is no file {str(path)!r}", hint="the path is relative to the current folder")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _failed_import(str(path), error) from error
    return module


def _environments(module: Any) -> list[str]:
    """The classes that the module or package itself defines and that look like environments."""
    inside = f"{module.__name__}."
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and hasattr(value, "step") and f"{value.__module__}.".startswith(inside)
    ]


def _attribute(module: Any, attribute: str, target: str) -> Callable[[], Any]:
    found = getattr(module, attribute, None)
    if found is None:
        classes = _environments(module)
        hint = f"environments there: {', '.join(classes)}" if classes else "it defines no class with a step method"
        raise TargetError(f"{target!r} has no {attribute!r}", hint=hint)
    if not callable(found):
        raise TargetError(f"{target!r} is not a class or function", hint="name the environment class")
    return _told(found, attribute) if inspect.isroutine(found) else found


def _told(factory: Callable[[], Any], name: str) -> Callable[[], Any]:
    """The factory, which says so when it cannot be called or makes no environment."""

    @wraps(factory)
    def make() -> Any:
        try:
            made = factory()
        except PaddockError:
            raise
        except Exception as error:
            message = f"{name}() could not be called: {type(error).__name__}: {error}"
            raise TargetError(message, hint="name a class, or a function that needs no arguments") from error
        missing = next((method for method in ("reset", "step") if not hasattr(made, method)), None)
        if missing is not None:
            message = f"{name}() returned {type(made).__name__}, which has no {missing}()"
            raise TargetError(message, hint="name an environment class, or a function that makes one")
        return made

    return make
