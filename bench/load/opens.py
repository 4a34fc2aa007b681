"""Opens sessions as fast as they come: connect, reset, answer. All stay open to the end."""

import gc
import time

from bench.load.program import Report, arguments, run, websocket_url
from bench.load.session import LoadSession, close_sessions, open_sessions


async def count_opens(url: str, count: int) -> Report:
    began, cpu_began = time.perf_counter(), time.process_time()
    sessions = await open_sessions(LoadSession, url, count)
    elapsed = time.perf_counter() - began
    cpu_share = (time.process_time() - cpu_began) / elapsed
    await close_sessions(sessions)
    return {"rate": count / elapsed, "generator_cpu_share": cpu_share}


if __name__ == "__main__":
    options = arguments(__doc__, sessions=2000)
    gc.disable()
    run(count_opens(websocket_url(options.url), options.sessions))
