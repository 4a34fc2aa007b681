"""The one handler behind every transport: what each request means for an environment.

HTTP, WebSocket, MCP and the in-memory client all end up in `submit`, so they cannot disagree. The
answer is a value: an observation, a state, a list of tools, a tool's result, or a PaddockError. There is
one exception, for speed: a plain step takes `Session.step_now` or `step_aside`, which keep the same rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from paddock.errors import NotSupported, PaddockError, ToolFailure, tool_error_class
from paddock.protocol.codec import model_fields
from paddock.protocol.episode import CallTool, GetState, ListTools, Request, Reset, Step
from paddock.protocol.mcp import plain_result, tool_listing, tool_result, with_score
from paddock.sessions.blueprint import Blueprint, Method, Where, call_tool_action, list_tools_action
from paddock.sessions.work import Work, count_step, is_done
from paddock.tools import ToolReturn
from paddock.types import State

if TYPE_CHECKING:
    from paddock.sessions.session import Session

Reply = Callable[[Work, Any], None]


class Plan(NamedTuple):
    """How a request is carried out: which method to run, with what, and what to make of its result."""

    method: Method
    argument: Any
    after: Callable[[Session, Work, Any], Any]


class Dispatch:
    """Carries out requests in sessions of one environment."""

    def __init__(self, blueprint: Blueprint, step_timeout: float | None) -> None:
        self.blueprint = blueprint
        self.step_timeout = blueprint.step_timeout or step_timeout

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
            work.method, work.argument, work.after = PLANS[type(request)](self.blueprint, request)
            session.episode.accept(request)
        except PaddockError as error:
            work.settle(error)
            return work
        work.timeout = self.step_timeout if timeout is None else self._allowed(timeout)
        session.submit(work)
        return work

    def answers_at_once(self, session: Session) -> bool:
        """Whether a call of a tool, submitted now, would be answered before `submit` returns."""
        blueprint = self.blueprint
        method = blueprint.call_tool if _calls_past_step(blueprint) else blueprint.step_by_tool
        return method.where is Where.INLINE and not session.is_running

    async def ask(
        self,
        session: Session,
        request: Request,
        *,
        number: Any = None,
        timeout: float | None = None,
        left: Callable[[], Awaitable[None]] | None = None,
    ) -> Any:
        """Like `submit`, for callers that can wait. Raises what went wrong.

        If the caller is cancelled, or `left` returns because it went away, the request is given up.
        """
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Any] = loop.create_future()

        def reply(_: Work, answer: Any) -> None:
            if not answered.done():
                answered.set_result(answer)

        work = self.submit(session, request, reply, number=number, timeout=timeout)
        watch = None
        if left is not None and not answered.done():
            watch = asyncio.ensure_future(left())
            watch.add_done_callback(lambda gone: None if gone.cancelled() else session.give_up(work))
        try:
            answer = await answered
        except asyncio.CancelledError:
            session.give_up(work)
            raise
        finally:
            if watch is not None:
                watch.cancel()
        if isinstance(answer, PaddockError):
            raise answer
        return answer

    def _allowed(self, asked: float) -> float:
        """A request may ask for less time than the server grants, not for more."""
        return asked if self.step_timeout is None else min(asked, self.step_timeout)


def _plan_reset(blueprint: Blueprint, request: Reset) -> Plan:
    return Plan(blueprint.reset, blueprint.reset.pick(request.arguments), _begun)


def _begun(session: Session, work: Work, observation: Any) -> Any:
    asked = work.request.arguments.get("episode_id")  # type: ignore[union-attr]
    session.episode.begun(asked, done=is_done(observation))
    return observation


def _plan_step(blueprint: Blueprint, request: Step) -> Plan:
    if request.extras:
        request.extras = blueprint.step.pick(request.extras)
    is_plain = getattr(request.action, "tool_name", None) in blueprint.plain_tools
    return Plan(blueprint.plain_step if is_plain else blueprint.step, request, count_step)


def _plan_state(blueprint: Blueprint, _: GetState) -> Plan:
    return Plan(blueprint.state, None, _own_or_given_state)


def _own_or_given_state(session: Session, _: Work, state: Any) -> Any:
    """An environment that keeps no state of its own is described by what the session has counted."""
    if state is None:
        return State(episode_id=session.episode.id, step_count=session.episode.steps)
    return state


def _plan_list_tools(blueprint: Blueprint, _: ListTools) -> Plan:
    return Plan(blueprint.list_tools, Step(list_tools_action(blueprint)), _listed)


def _listed(_session: Session, _work: Work, observation: Any) -> Any:
    return [_foreign_listing(tool) for tool in observation.tools]


def _plan_call_tool(blueprint: Blueprint, request: CallTool) -> Plan:
    is_plain = request.name in blueprint.plain_tools
    if _calls_past_step(blueprint):
        return Plan(blueprint.plain_call if is_plain else blueprint.call_tool, request, _called)
    action = call_tool_action(blueprint, request.name, request.arguments)
    return Plan(blueprint.plain_step if is_plain else blueprint.step_by_tool, Step(action), _called_as_step)


def _calls_past_step(blueprint: Blueprint) -> bool:
    return blueprint.tools is not None and not blueprint.mcp_calls_are_steps


def _called(session: Session, work: Work, value: Any) -> Any:
    spec = session.environment.tools.get(work.request.name)  # type: ignore[union-attr]
    if isinstance(value, ToolReturn):
        return with_score(tool_result(value.value, spec), value.reward, value.done)
    return tool_result(value, spec)


def _called_as_step(session: Session, _: Work, observation: Any) -> Any:
    """The `tools/call` result inside a tool observation. Only a call that ran counts as a step."""
    error = getattr(observation, "error", None)
    failure = None if error is None else _failure(session, error)
    if failure is None or type(failure) is ToolFailure:
        session.episode.stepped(is_done(observation))
    if failure is not None:
        raise failure
    result = plain_result(getattr(observation, "result", None))
    return with_score(result, observation.reward, is_done(observation))


def _failure(session: Session, error: Any) -> ToolFailure:
    """What the error in a tool observation stands for: as the tool's own exception told, or else as it says."""
    told = getattr(getattr(session.environment, "mcp_client", None), "failed_by", None)
    kind: type[ToolFailure] = told or tool_error_class(error.error_type)
    return kind(error.message)


PLANS: dict[type, Callable[[Blueprint, Any], Plan]] = {
    Reset: _plan_reset,
    Step: _plan_step,
    GetState: _plan_state,
    ListTools: _plan_list_tools,
    CallTool: _plan_call_tool,
}


def tools_of(blueprint: Blueprint) -> list[dict[str, Any]] | None:
    """The tools of a class that declares them, without asking an instance; None if one must be asked."""
    if blueprint.tools is not None:
        return [tool_listing(spec) for spec in blueprint.tools.values()]
    if not blueprint.has_tools:
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
