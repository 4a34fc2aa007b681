import pickle

import pytest

from paddock import errors
from paddock.errors import PaddockError, from_wire


def family(root: type[PaddockError]) -> list[type[PaddockError]]:
    own = [child for child in root.__subclasses__() if child.__module__ == "paddock.errors"]
    return [root, *(each for child in own for each in family(child))]


@pytest.mark.parametrize("kind", [kind for kind in family(PaddockError) if kind.code != "CLIENT_ERROR"])
def test_an_error_survives_the_wire(kind: type[PaddockError]) -> None:
    again = from_wire(kind("it broke", hint="try this", number=3).to_wire())
    assert (again.code, again.kind) == (kind.code, kind.kind)
    assert (again.message, again.hint, again.data) == ("it broke", "try this", {"number": 3})
    assert issubclass(kind, type(again))


def test_every_error_is_drawn_in_the_tree() -> None:
    assert all(kind.__name__ in (errors.__doc__ or "") for kind in family(PaddockError))


def test_an_unknown_code_is_a_server_error() -> None:
    error = from_wire({"code": "WHATEVER", "message": "odd", "extra": 1})
    assert isinstance(error, errors.ServerError)
    assert "WHATEVER" in error.message
    assert error.data["server_code"] == "WHATEVER"


@pytest.mark.parametrize("data", [{}, {"message": None}, {"code": None}, {"code": 5, "message": 5, "hint": 5}])
def test_a_strange_error_frame_is_still_an_error(data: dict[str, object]) -> None:
    assert isinstance(from_wire(data), PaddockError)


@pytest.mark.parametrize("key", ["self", "message", "hint"])
def test_no_key_of_a_foreign_frame_breaks_the_error(key: str) -> None:
    assert isinstance(from_wire({"code": "SESSION_ERROR", "message": "m", key: "x"}), errors.SessionError)


def test_timeouts_are_the_builtin_too() -> None:
    assert issubclass(errors.StepTimeout, TimeoutError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    assert issubclass(errors.EpisodeLost, ConnectionError)


def test_an_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(errors.SessionBusy("wait", hint="a little", waiting=3)))
    assert (error.message, error.hint, error.data) == ("wait", "a little", {"waiting": 3})
