"""The one request handler behind every transport: maps each request to a method of the environment.

HTTP, WebSocket, MCP and the in-memory client all call `submit`, so they cannot disagree. It looks up how the
request is carried out (`PLANS`: which method, with which argument, what to make of the result), checks that the
episode allows it, and gives the work to the session. The answer is a value: an observation, a state, a list of
tools, a tool's result, or a PaddockError. Transports turn it into bytes.

Knows no transport, no thread and no queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from paddock.errors import NotSupported, PaddockError, ToolFailure, ToolNotFound, tool_error_class
from paddock.protocol.codec import model_fields
from paddock.protocol.episode import CallTool, GetState, ListTools, Request, Reset, Step
from paddock.protocol.mcp import plain_result, tool_listing, tool_result, with_score
from paddock.sessions.spec import EnvironmentSpec, Method, Where, call_tool_action, list_tools_action
from paddock.sessions.work import Work, is_done
from paddock.tools import ToolReturn, unknown_tool
from paddock.types import State

if TYPE_CHECKING:
    from paddock.sessions.session import Session

Reply = Callable[[Work, Any], None]


class Plan(NamedTuple):
    """How a request is carried out: the method, its argument, and `after`, which turns its result into the answer."""

    method: Method
    argument: Any
    after: Callable[[Session, Work, Any], Any]


class Dispatch:
    """Carries out requests in sessions of one environment class."""

    def __init__(self, spec: EnvironmentSpec, step_timeout: float | None) -> None:
        self.spec = spec
        self.step_timeout = spec.step_timeout or step_timeout

    def submit(
        self,
        session: Session,
        request: Request,
        reply: Reply,
        *,
        number: Any = None,
        timeout: float | None = None,
    ) -> Work:
        """Carry out `request` in `session` and call `reply(work, answer)` once, on the loop."""
        work = Work(session, request, reply, number)
        try:
            work.method, work.argument, work.after = PLANS[type(request)](self.spec, request)
            session.episode.accept(request)
        except PaddockError as error:
            work.settle(error)
            return work
        work.timeout = self.limit_timeout(timeout)
        session.submit(work)
        return work

    def answers_inline(self, session: Session) -> bool:
        """Whether a tool call, submitted now, would be answered before `submit` returns."""
        spec = self.spec
        method = spec.call_tool if _calls_past_step(spec) else spec.step_by_tool
        return method.where is Where.INLINE and not session.is_running

    async def execute(
        self,
        session: Session,
        request: Request,
        *,
        number: Any = None,
        timeout: float | None = None,
        disconnect_wait: Callable[[], Awaitable[None]] | None = None,
    ) -> Any:
        """Like `submit`, but waits for the answer and returns it. Raises it if it is an error.

        The request is given up if the caller is cancelled, or if `disconnect_wait` returns before the answer.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def reply(_: Work, answer: Any) -> None:
            if not future.done():
                future.set_result(answer)

        work = self.submit(session, request, reply, number=number, timeout=timeout)
        watcher = None
        if disconnect_wait is not None and not future.done():
            watcher = asyncio.ensure_future(disconnect_wait())
            watcher.add_done_callback(lambda task: None if task.cancelled() else session.give_up(work))
        try:
            answer = await future
        except asyncio.CancelledError:
            session.give_up(work)
            raise
        finally:
            if watcher is not None:
                watcher.cancel()
        if isinstance(answer, PaddockError):
            raise answer
        return answer

    def limit_timeout(self, requested: float | None) -> float | None:
        """A request may ask for less time than the server grants, not for more."""
        if requested is None or self.step_timeout is None:
            return self.step_timeout if requested is None else requested
        return min(requested, self.step_timeout)


def _plan_reset(spec: EnvironmentSpec, request: Reset) -> Plan:
    return Plan(spec.reset, spec.reset.pick(request.arguments), _record_reset)


def _record_reset(session: Session, work: Work, observation: Any) -> Any:
    episode_id = work.request.arguments.get("episode_id")  # type: ignore[union-attr]
    session.episode.record_reset(episode_id, done=is_done(observation))
    return observation


def _plan_step(spec: EnvironmentSpec, request: Step) -> Plan:
    if request.extras:
        request.extras = spec.step.pick(request.extras)
    is_plain = getattr(request.action, "tool_name", None) in spec.plain_tools
    return Plan(spec.plain_step if is_plain else spec.step, request, _record_step)


def _record_step(session: Session, _: Work, observation: Any) -> Any:
    session.episode.record_step(is_done(observation))
    return observation


def _plan_state(spec: EnvironmentSpec, _: GetState) -> Plan:
    return Plan(spec.state, None, _state_or_counts)


def _state_or_counts(session: Session, _: Work, state: Any) -> Any:
    """An environment that keeps no state of its own is described by what the session has counted."""
    if state is None:
        return State(episode_id=session.episode.id, step_count=session.episode.steps)
    return state


def _plan_list_tools(spec: EnvironmentSpec, _: ListTools) -> Plan:
    return Plan(spec.list_tools, Step(list_tools_action(spec)), _listing_in_observation)


def _listing_in_observation(_session: Session, _work: Work, observation: Any) -> Any:
    return [_foreign_listing(tool) for tool in observation.tools]


def _plan_call_tool(spec: EnvironmentSpec, request: CallTool) -> Plan:
    is_plain = request.name in spec.plain_tools
    if _calls_past_step(spec):
        return Plan(spec.plain_call if is_plain else spec.call_tool, request, _result_of_tool)
    action = call_tool_action(spec, request.name, request.arguments)
    return Plan(spec.plain_step if is_plain else spec.step_by_tool, Step(action), _result_in_observation)


def _calls_past_step(spec: EnvironmentSpec) -> bool:
    return spec.tools is not None and not spec.mcp_calls_are_steps


def _result_of_tool(session: Session, work: Work, value: Any) -> Any:
    tool = session.environment.tools.get(work.request.name)  # type: ignore[union-attr]
    if isinstance(value, ToolReturn):
        return with_score(tool_result(value.value, tool), value.reward, value.done)
    return tool_result(value, tool)


def _result_in_observation(session: Session, work: Work, observation: Any) -> Any:
    """The `tools/call` result inside a tool observation. Only a call that ran counts as a step."""
    error = getattr(observation, "error", None)
    failure = None if error is None else _failure(session, work, error)
    if failure is None or type(failure) is ToolFailure:
        session.episode.record_step(is_done(observation))
    if failure is not None:
        raise failure
    result = plain_result(getattr(observation, "result", None))
    return with_score(result, observation.reward, is_done(observation))


def _failure(session: Session, work: Work, error: Any) -> ToolFailure:
    """The error in a tool observation as ours: by the tool's own exception if that is known, else by its name."""
    tools = getattr(session.environment, "tools", None)
    if error.error_type == ToolNotFound.error_type and isinstance(tools, dict):
        return unknown_tool(work.request.name, tools)  # type: ignore[union-attr]
    exception_type = getattr(getattr(session.environment, "mcp_client", None), "failed_by", None)
    kind: type[ToolFailure] = exception_type or tool_error_class(error.error_type)
    return kind(error.message)


PLANS: dict[type, Callable[[EnvironmentSpec, Any], Plan]] = {
    Reset: _plan_reset,
    Step: _plan_step,
    GetState: _plan_state,
    ListTools: _plan_list_tools,
    CallTool: _plan_call_tool,
}


def tools_of(spec: EnvironmentSpec) -> list[dict[str, Any]] | None:
    """The tools of a class that declares them; None if only an instance can list them. Raises NotSupported."""
    if spec.tools is not None:
        return [tool_listing(tool) for tool in spec.tools.values()]
    if not spec.has_tools:
        raise NotSupported("Environment does not support MCP", hint="derive from ToolEnvironment to offer tools")
    return None


def _foreign_listing(tool: Any) -> dict[str, Any]:
    """The listing of a tool that the environment describes itself, in either spelling."""
    fields = model_fields(tool)
    return {
        **{name: fields.get(name) for name in ("title", "outputSchema", "icons", "annotations", "meta", "execution")},
        "name": fields["name"],
        "description": fields.get("description") or "",
        "inputSchema": fields.get("input_schema") or fields.get("inputSchema") or {"type": "object"},
    }
