"""The words of the wire, built for sending and for comparing.

A part of an answer that may vary is a shape; everything else must match to the letter.
"""

from typing import Any

import pytest

from .shapes import Besides, Including, Matching, Some

Table = dict[str, tuple[Any, Any]]

NEGATIVE = "Input should be greater than or equal to 0"
NOT_AN_INTEGER = "Input should be a valid integer, unable to parse string as an integer"
# Pydantic has a word of its own for this when it reads the JSON itself.
NOT_A_DICTIONARY = Matching("^Input should be (a valid dictionary|an object)$")
NOT_A_STRING = "Input should be a valid string"
NOT_PERMITTED = "Extra inputs are not permitted"
REQUIRED = "Field required"
TOO_LONG = "String should have at most 255 characters"


def exchanges(table: Table) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("sent", "answer"), table.values(), ids=table.keys())


def violation(kind: str, loc: list[Any], message: Any, value: Any, **ctx: Any) -> dict[str, Any]:
    """A broken rule as it is told on sockets, and for actions over HTTP: with a link to its explanation."""
    link = {"url": Matching(rf"^https://errors\.pydantic\.dev/.+/v/{kind}$")}
    return {**body_violation(kind, loc, message, value, **ctx), **link}


def body_violation(kind: str, loc: list[Any], message: Any, value: Any, **ctx: Any) -> dict[str, Any]:
    """A broken rule as it is told about the HTTP body around an action."""
    rule = {"type": kind, "loc": loc, "msg": message, "input": value}
    return {**rule, "ctx": ctx} if ctx else rule


def told(status: int, detail: str) -> tuple[int, Any]:
    """An HTTP error in words. Paddock may add its code and a hint."""
    return status, Besides({"detail": detail}, "code", "hint")


def step(**data: Any) -> dict[str, Any]:
    return {"type": "step", "data": data}


def counted(total: int, reward: float | None, done: bool = False) -> dict[str, Any]:
    data = {"observation": {"metadata": {}, "total": total}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def failed(code: str, message: Any, **more: Any) -> dict[str, Any]:
    """An error frame. Paddock may add what kind of error it is and a hint."""
    return {"type": "error", "data": Besides({"message": message, "code": code, **more}, "kind", "hint")}


def refused(*errors: dict[str, Any]) -> dict[str, Any]:
    return failed("VALIDATION_ERROR", "Invalid message", errors=list(errors))


def rpc(method: str, /, id: Any = 1, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": method, **({"params": params} if params else {})}


def rpc_result(id: Any, result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "result": result}


def rpc_error(id: Any, code: int, message: Any = None, data: Any = None) -> dict[str, Any]:
    """An error answer. Paddock may name the error in its data, and add a hint."""
    reply = Besides(data or {}, "code", "kind", "error_type", "hint")
    return {
        "jsonrpc": "2.0",
        "id": id,
        "error": {"code": code, "message": message or Some(str), "data": reply},
    }


TAKES_A_MESSAGE = Including(
    type="object", required=["message"], properties=Including(message=Including(type="string"))
)


def text_result(text: str, data: Any, structured: Any) -> Including:
    return Including(
        content=[Including(type="text", text=text)],
        structured_content=structured,
        data=data,
        is_error=False,
        meta=Some(object),
    )


def said(message: str) -> Including:
    return text_result(message, message, {"result": message})


HELLO = {"message": "hello", "length": 5}


HELLO_RESULT = text_result(Matching(r'^\{"message": ?"hello", ?"length": ?5\}$'), HELLO, HELLO)
