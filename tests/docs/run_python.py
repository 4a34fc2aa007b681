"""Run a block of Python as `python FILE` would, but with `await` and `async with` on its first level.

python run_python.py BLOCK [SETUP]
"""

import ast
import asyncio
import inspect
import sys
from pathlib import Path


def main(block: str, setup: str | None = None) -> None:
    sys.path[0] = ""
    names = {"__name__": "__main__"}
    files = [file for file in (setup, block) if file]
    programs = [compile(Path(file).read_text(), file, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT) for file in files]

    async def run() -> None:
        for program in programs:
            result = eval(program, names)
            if inspect.iscoroutine(result):
                await result

    if any(program.co_flags & inspect.CO_COROUTINE for program in programs):
        asyncio.run(run())
    else:
        for program in programs:
            exec(program, names)


if __name__ == "__main__":
    main(*sys.argv[1:])
