"""Importing a class by name: an environment (`pkg.mod:Class`, `path/to/file.py:Class`), or the one class of a plug-in
module (an agent, a dialect)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError, PaddockError, TargetError

if TYPE_CHECKING:
    from collections.abc import Callable


def class_in_file(place: str, attribute: str) -> Callable[[], Any]:
    """The class or factory that `path/to/file.py:Class` names. Raises TargetError."""
    return _attribute(_file_module(Path(place)), attribute, f"{place}:{attribute}")


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
            "is the package installed here?"
            if place.startswith(missing)
            else f"the target imports {missing!r}, which is not installed: pip install it first"
        )
        raise TargetError(f"cannot import {place!r}: no module named {missing!r}", hint=hint) from error
    except (Exception, SystemExit) as error:
        raise _failed_import(place, error) from error
    return _attribute(module, attribute, target)


def class_named(base: type, module: str, name: str) -> Any:
    """The subclass of `base` in a module whose `name` is this one. Raises ConfigError if there is none."""
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, type) and issubclass(value, base) and getattr(value, "name", None) == name:
            return value
    raise ConfigError(f"{module} has no {base.__name__} with the name {name!r}", hint=f"set `name = {name!r}` in it")


def missing_class(path: str) -> TargetError:
    """The error for a file without a class."""
    module = _file_module(Path(path))
    candidates = " or ".join(f"{path}:{name}" for name in _environments(module)) or f"{path}:Class"
    return TargetError(f"{path!r} is a file, not an environment", hint=f"name the class: {candidates}")


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
    factory = getattr(module, attribute, None)
    if factory is None:
        classes = _environments(module)
        hint = f"environments there: {', '.join(classes)}" if classes else "it defines no class with a step method"
        raise TargetError(f"{target!r} has no {attribute!r}", hint=hint)
    if not callable(factory):
        raise TargetError(f"{target!r} is not a class or function", hint="name the environment class")
    return _checked_factory(factory, attribute) if inspect.isroutine(factory) else factory


def _checked_factory(factory: Callable[[], Any], name: str) -> Callable[[], Any]:
    """The factory, which says so when it cannot be called or makes no environment."""

    @wraps(factory)
    def make() -> Any:
        try:
            environment = factory()
        except PaddockError:
            raise
        except Exception as error:
            message = f"{name}() could not be called: {type(error).__name__}: {error}"
            raise TargetError(message, hint="name a class, or a function that needs no arguments") from error
        missing = next((method for method in ("reset", "step") if not hasattr(environment, method)), None)
        if missing is not None:
            message = f"{name}() returned {type(environment).__name__}, which has no {missing}()"
            raise TargetError(message, hint="name an environment class, or a function that makes one")
        return environment

    return make
