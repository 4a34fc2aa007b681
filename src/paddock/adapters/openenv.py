"""`openenv:PLACE[@VENV]`: an OpenEnv environment as a target, unmodified.

PLACE is `pkg.mod:Class`, a module whose app is to be served, or a folder with `openenv.yaml`. Without VENV it runs in
this process. VENV is a folder, or a path to python. If that interpreter can run our server too, the whole command is
executed again under it (`exec_in_venv`), so that no step crosses processes. Otherwise the environment runs in child
processes under it (`child_environment.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel

import paddock
from paddock.adapters.child_environment import environment_class
from paddock.errors import TargetError
from paddock.loading import class_in_module
from paddock.sessions.isolation.process import HostProcess, find_interpreter

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("paddock.adapters")

LOADER = Path(__file__).with_name("openenv_loader.py")
SCHEME = "openenv:"
PATHS_VARIABLE = "PADDOCK_IMPORT_PATHS"
"""Passes our import paths to the other interpreter, and marks that it runs already."""
ADD_PATHS = f"import os, sys; sys.path.extend(os.environ[{PATHS_VARIABLE!r}].split(os.pathsep)); "
CHECK_PROGRAM = ADD_PATHS + "import paddock.server.run, paddock.adapters.openenv_loader; print(*sys.version_info[:2])"
MAIN_PROGRAM = ADD_PATHS + "from paddock.cli import main; main(sys.argv[1:])"
CHECK_SECONDS = 60.0


def load(rest: str) -> tuple[Callable[[], Any], str]:
    """Raises TargetError."""
    place, at, venv = rest.rpartition("@")
    place, python = (place, find_interpreter(venv)) if at else (rest, None)
    name = _name(place)
    if python is not None:
        process = HostProcess(python, LOADER, place)
        description = process.start()
        return environment_class(process, description), description.get("called") or name
    if importlib.util.find_spec("openenv") is None:
        raise TargetError(
            f"openenv:{place} needs the openenv package, which is not installed here",
            hint=f"say where it is: openenv:{place}@PATH/TO/VENV, or pip install openenv",
        )
    if ":" not in place:
        arguments = from_app(place)
        return arguments, arguments.name or name
    return with_types(class_in_module(place)), name


@dataclass(frozen=True, slots=True)
class AppArguments:
    """The arguments of an app to `create_app`: an environment factory and its types."""

    make: Callable[[], Any]
    action_type: Any
    observation_type: Any
    state_type: Any
    name: str | None = None
    """The name that the app gives to its environment."""

    def __call__(self) -> Any:
        return self.make()


def from_app(place: str) -> AppArguments:
    """The arguments that the app of a folder or a module passes to `create_app`. Raises TargetError."""
    loader: Any = importlib.import_module("paddock.adapters.openenv_loader")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return AppArguments(*(loader.from_folder(place) if Path(place).is_dir() else loader.from_app(place)))
    except Exception as error:
        hint = getattr(error, "hint", "") or "does it run under OpenEnv's own server?"
        raise TargetError(f"{place!r} cannot be loaded: {type(error).__name__}: {error}", hint=hint) from error


def with_types(factory: Callable[[], Any]) -> Callable[[], Any]:
    """A class that names its types only in the annotations of its methods gets them as `action_type` and so on."""
    if not isinstance(factory, type) or hasattr(factory, "action_type") or _is_parametrized(factory):
        return factory
    types: dict[str, Any] = {}
    for attribute, method, annotation in (("action", "step", "action"), ("observation", "reset", "return")):
        try:
            annotated = get_type_hints(getattr(factory, method)).get(annotation)
        except (AttributeError, NameError, TypeError):
            continue
        if isinstance(annotated, type) and issubclass(annotated, BaseModel):
            types[f"{attribute}_type"] = annotated
    return type(factory.__name__, (factory,), {"__module__": factory.__module__, "__doc__": factory.__doc__, **types})


def _is_parametrized(factory: type) -> bool:
    bases = (each for base in factory.__mro__ for each in vars(base).get("__orig_bases__", ()))
    return any(
        getattr(get_origin(each), "__name__", "") == "Environment" and isinstance(get_args(each)[0], type)
        for each in bases
    )


def _name(place: str) -> str:
    if ":" in place:
        return place.rpartition(":")[2].lower()
    parts = place.replace("/", ".").rstrip(".").split(".")
    names = [part for part in parts if part not in ("server", "app")]
    return names[-1] if names else "openenv"


# -- the whole server in the other interpreter -------------------------------------------------------


def exec_in_venv(target: str, words: list[str]) -> None:
    """Execute the same command under the interpreter of `target`; returns if there is none, or if it does not fit.

    Raises TargetError if it names an interpreter that does not exist.
    """
    place, at, venv = target.removeprefix(SCHEME).rpartition("@")
    if not target.startswith(SCHEME) or not at or target not in words or PATHS_VARIABLE in os.environ:
        return
    python = find_interpreter(venv)
    folders = [str(Path(paddock.__file__).parent.parent), sysconfig.get_paths()["purelib"]]
    variables = {**os.environ, PATHS_VARIABLE: os.pathsep.join(folders)}
    if not can_run_server(python, variables):
        logger.info("%s cannot run the server: %s runs in child processes", python, place)
        return
    command = [f"{SCHEME}{place}" if word == target else word for word in words]
    os.execve(python, [python, "-c", MAIN_PROGRAM, *command], variables)


def can_run_server(python: str, variables: dict[str, str]) -> bool:
    """Whether the interpreter is of our Python, and can import a server and OpenEnv together."""
    try:
        done = subprocess.run(
            [python, "-c", CHECK_PROGRAM],
            env=variables,
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.split() == [str(part) for part in sys.version_info[:2]]
