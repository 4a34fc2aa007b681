"""Steps many `/ws` sessions, each as fast as its answers come."""

import asyncio
import gc
import time

from picows import WSFrame, WSMsgType, WSTransport

from bench.load.meter import Meter
from bench.load.program import Report, arguments, run, websocket_url
from bench.load.session import STEP, LoadSession, check_observation, close_sessions, open_sessions

WARM_UP_SECONDS = 0.5
DRAIN_SECONDS = 10.0


class SteppingSession(LoadSession):
    """Sends the next step from within the callback that brings the last answer."""

    def __init__(self) -> None:
        super().__init__()
        self.meter: Meter | None = None
        """Set from the first step to the answer to the last one."""

        self.last_answer = b""
        self.step = STEP
        self._sent = 0.0

    def begin(self, meter: Meter) -> None:
        self.meter = meter
        self._sent = time.perf_counter()
        self.transport.send(WSMsgType.TEXT, self.step)

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        meter = self.meter
        if meter is None:
            super().on_ws_frame(transport, frame)
            return
        payload = frame.get_payload_as_bytes()
        now = time.perf_counter()
        if b'"observation"' not in payload:
            meter.fail(f"the server answered {payload[:300]!r}")
        elif meter.stopped:
            self.meter = None
            self.last_answer = payload
        else:
            meter.latencies.append(now - self._sent)
            self._sent = now
            transport.send(WSMsgType.TEXT, self.step)

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        super().on_ws_disconnected(transport)
        if self.meter is not None:
            self.meter.fail("the server closed a session while it was stepped")


async def step_sessions(url: str, count: int, seconds: float, action: str) -> Report:
    sessions = await open_sessions(SteppingSession, url, count)
    meter = Meter()
    for session in sessions:
        if action:
            session.step = f'{{"type":"step","data":{action}}}'.encode()
        session.begin(meter)
    report = await meter.measure(WARM_UP_SECONDS, seconds)
    await _drain(sessions)
    for session in sessions:
        check_observation(session.last_answer)
    await close_sessions(sessions)
    return report


async def _drain(sessions: list[SteppingSession]) -> None:
    deadline = time.perf_counter() + DRAIN_SECONDS
    while any(session.meter is not None for session in sessions):
        if time.perf_counter() > deadline:
            raise RuntimeError("a step was not answered")
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    options = arguments(__doc__, sessions=16, seconds=2.0, action="")
    gc.disable()
    run(step_sessions(websocket_url(options.url), options.sessions, options.seconds, options.action))
