"""How a client script answers: each scenario runs on the address given, and one JSON object is printed.

A scenario that fails leaves its traceback in place of its answer, so it does not hide the others.
"""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any


def report(*scenarios: Callable[..., Any]) -> None:
    print(json.dumps({scenario.__name__: answer(scenario) for scenario in scenarios}))


def answer(scenario: Callable[..., Any]) -> Any:
    try:
        result = scenario(*sys.argv[1:])
        return asyncio.run(result) if inspect.iscoroutine(result) else result
    except BaseException as error:
        return {"failed": "".join(traceback.format_exception(error))}
