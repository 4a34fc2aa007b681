"""Opens sessions and leaves them idle: prints a line when all are open, ends with its input."""

import asyncio
import sys

from bench.load.program import Report, arguments, run, websocket_url
from bench.load.session import LoadSession, close_sessions, open_sessions

HOLD_SECONDS = 120.0


async def hold_sessions(url: str, count: int) -> Report:
    sessions = await open_sessions(LoadSession, url, count)
    print("open", flush=True)
    released = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await asyncio.wait_for(released, HOLD_SECONDS)
    lost = sum(session.transport.is_disconnected for session in sessions)
    await close_sessions(sessions)
    return {"sessions": count, "lost": lost}


if __name__ == "__main__":
    options = arguments(__doc__, sessions=4000)
    run(hold_sessions(websocket_url(options.url), options.sessions))
