"""What a server must get right on the OpenEnv wire, check by check.

Runs against any server that speaks it. Where Paddock promises more than OpenEnv does, a failure of
somebody else's server is a note and no more.
"""

from __future__ import annotations

import uuid
from contextlib import asynccontextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

from paddock.testing.checks import Doubtful, Skipped, Suite, Wrong, shorten
from paddock.testing.examples import MISSPELT, NoExample, counterexamples
from paddock.testing.peer import Peer, Reply, Wire, is_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

DEEP = 10_000
MCP_VERSION = "2025-06-18"

SERVER: Suite[Peer] = Suite()
check = SERVER.check


def beyond_openenv(peer: Peer) -> str | None:
    return None if peer.is_paddock else "beyond OpenEnv"


# -- GET ----------------------------------------------------------------------------------------------


@check("answer GET /health with 200 and {'status': 'healthy'}")
async def health_is_healthy(peer: Peer) -> None:
    reply = await peer.get("/health")
    if reply.status != 200 or field(reply, "status") != "healthy":
        raise Wrong(f"/health answers {reply.short}")


@check("answer GET /metadata with at least a name and a description")
async def metadata_names_the_environment(peer: Peer) -> str:
    reply = await peer.get("/metadata")
    if reply.status != 200 or not all(isinstance(field(reply, name), str) for name in ("name", "description")):
        raise Wrong(f"/metadata answers {reply.short}")
    return str(field(reply, "name"))


@check("answer GET /schema with a JSON Schema under each of action, observation and state")
async def schema_describes_the_environment(peer: Peer) -> None:
    reply = await peer.get("/schema")
    missing = [name for name in ("action", "observation", "state") if not isinstance(field(reply, name), dict)]
    if reply.status != 200 or missing:
        raise Wrong(f"/schema has no {' and no '.join(missing) or 'answer'}: {reply.short}")


@check("list /reset, /step and /state in /openapi.json, or none of them in production mode")
async def openapi_lists_the_routes(peer: Peer) -> str:
    reply = await peer.get("/openapi.json")
    paths, about = field(reply, "paths"), field(reply, "info")
    if not isinstance(paths, dict) or not isinstance(about, dict) or not isinstance(about.get("version"), str):
        raise Wrong(f"/openapi.json answers {reply.short}")
    listed = [path for path in ("/reset", "/step", "/state") if path in paths]
    if len(listed) not in (0, 3):
        raise Wrong(f"only {' and '.join(listed)} listed")
    return "simulation mode" if listed else "production mode"


# -- /ws ----------------------------------------------------------------------------------------------


@check("accept WebSockets at /ws, and give each a session of its own")
async def a_socket_gets_a_session(peer: Peer) -> None:
    async with peer.session():
        pass


@check(
    "answer {'type':'reset'} with {'type':'observation','data':{observation, reward, done}}",
    needs=[a_socket_gets_a_session],
)
async def reset_is_answered_with_an_observation(peer: Peer) -> None:
    async with peer.session() as wire:
        require_observation(await wire.ask({"type": "reset"}))


@check(
    "answer {'type':'step','data':ACTION} with {'type':'observation','data':{observation, reward, done}}",
    needs=[reset_is_answered_with_an_observation],
)
async def step_is_answered_with_an_observation(peer: Peer) -> None:
    async with peer.session() as wire:
        await take_step(peer, wire)


@check(
    "answer {'type':'state'} with an object that has episode_id and step_count, and count each step",
    needs=[step_is_answered_with_an_observation],
)
async def state_tells_the_episode_and_its_steps(peer: Peer) -> None:
    mine = f"check-{uuid.uuid4()}"
    async with peer.session() as wire:
        await wire.ask({"type": "reset", "data": {"episode_id": mine}})
        before = await read_state(wire)
        await take_step(peer, wire, reset=False)
        after = await read_state(wire)
    missing = [name for name in ("episode_id", "step_count") if name not in after]
    if missing:
        raise Wrong(f"the state has no {' and no '.join(missing)}")
    if (before["step_count"], after["step_count"]) != (0, 1):
        raise Doubtful(f"step_count is {before['step_count']} after reset, {after['step_count']} after a step")
    if after["episode_id"] != mine:
        raise Doubtful(f"reset(episode_id={mine!r}) left the episode_id at {after['episode_id']!r}")


@check("carry out the requests of a socket one after the other", needs=[a_socket_gets_a_session])
async def requests_sent_ahead_are_answered_in_order(peer: Peer) -> None:
    async with peer.session() as wire:
        for kind in ("state", "reset", "state"):
            wire.send({"type": kind})
        kinds = [(await wire.receive()).get("type") for _ in range(3)]
    if kinds != ["state", "observation", "state"]:
        raise Wrong(f"state, reset, state were answered with {', '.join(map(str, kinds))}")


@check("answer with the code INVALID_JSON and keep the connection", needs=[a_socket_gets_a_session])
async def text_that_is_no_json_is_refused(peer: Peer) -> None:
    await require_refusals(peer, "INVALID_JSON", ["", "{", "no json"])


@check("answer with the code UNKNOWN_TYPE and keep the connection", needs=[a_socket_gets_a_session])
async def an_unknown_type_is_refused(peer: Peer) -> None:
    await require_refusals(peer, "UNKNOWN_TYPE", [{"type": "bogus"}, {"data": {}}, {"type": None}])


@check("answer with the code VALIDATION_ERROR and keep the connection", needs=[a_socket_gets_a_session])
async def a_bad_envelope_is_refused(peer: Peer) -> None:
    frames = [{"type": "step"}, {"type": "state", "data": {}}, {"type": "reset", "data": [], "extra": 1}]
    await require_refusals(peer, "VALIDATION_ERROR", frames)


@check(
    "validate an action before the environment sees it: VALIDATION_ERROR, and nothing has happened",
    needs=[a_socket_gets_a_session],
)
async def a_bad_action_is_refused(peer: Peer) -> str:
    bad = await bad_actions(peer)
    await require_refusals(peer, "VALIDATION_ERROR", [{"type": "step", "data": action} for _, action in bad])
    return f"refused: {', '.join(problem for problem, _ in bad)}"


@check(
    "answer JSON that is no object with an error, and keep the connection",
    needs=[a_socket_gets_a_session],
    excuse=beyond_openenv,
)
async def an_array_keeps_the_connection(peer: Peer) -> None:
    await require_refusals(peer, None, ["[]", "3", "null", '"text"'])


@check(
    "answer a binary frame with an error, and keep the connection",
    needs=[a_socket_gets_a_session],
    excuse=beyond_openenv,
)
async def a_binary_frame_keeps_the_connection(peer: Peer) -> None:
    await require_refusals(peer, None, [b"\x00\xff"])


@check(
    "answer JSON that is too deep with an error, and keep the connection",
    needs=[a_socket_gets_a_session],
    excuse=beyond_openenv,
)
async def deep_json_keeps_the_connection(peer: Peer) -> None:
    await require_refusals(peer, None, ["[" * DEEP + "]" * DEEP])


@check("answer {'type':'close'} by closing with code 1000", needs=[a_socket_gets_a_session])
async def close_is_answered_by_closing(peer: Peer) -> None:
    async with peer.session() as wire:
        wire.send({"type": "close"})
        goodbye = await wire.goodbye()
    if goodbye.code != 1000:
        raise Wrong(f"the server closed with code {goodbye.code}")


@check("answer /ws?session_id=UNKNOWN with the code SESSION_ERROR, and close")
async def an_unknown_session_id_is_refused(peer: Peer) -> None:
    async with peer.socket(f"/ws?session_id={uuid.uuid4()}") as wire:
        require_error(await wire.receive(), "SESSION_ERROR", "an unknown session_id")
        await wire.goodbye()


# -- after a drop -------------------------------------------------------------------------------------


@check("free the slot of a socket that vanished", needs=[reset_is_answered_with_an_observation])
async def a_new_episode_begins_after_a_dropped_socket(peer: Peer) -> None:
    async with peer.session() as wire:
        await wire.ask({"type": "reset"})
        wire.link.abort()
        await wire.goodbye()
    try:
        async with peer.session() as wire:
            require_observation(await wire.ask({"type": "reset"}))
    except Skipped as full:
        raise Wrong(f"after the drop, {full.detail}") from None


@check(
    "hand out a Session-Id to a client that sends 'Session-Resume: new', and let it return with it",
    needs=[step_is_answered_with_an_observation],
    excuse=beyond_openenv,
)
async def a_step_goes_on_after_a_dropped_socket(peer: Peer) -> None:
    async with peer.session({"Session-Resume": "new"}) as wire:
        token = wire.link.headers.get("Session-Id")
        if token is None:
            raise Wrong("the server hands out no Session-Id to return with")
        await take_step(peer, wire)
        before = await read_state(wire)
        wire.link.abort()
        await wire.goodbye()
    async with peer.socket(headers={"Session-Resume": token}) as wire:
        again = await read_state(wire)
        if again != before:
            raise Wrong(
                f"the state was {shorten(str(before), 120)}, and is {shorten(str(again), 120)} after the drop"
            )
        await take_step(peer, wire, reset=False)


@check(
    "keep the answers to numbered requests, and repeat them instead of acting twice",
    needs=[step_is_answered_with_an_observation],
    excuse=beyond_openenv,
)
async def a_repeated_request_is_not_carried_out_twice(peer: Peer) -> None:
    action = await peer.action()
    async with peer.session({"Session-Resume": "new"}) as wire:
        require_observation(await wire.ask({"type": "reset", "id": 1}))
        step = {"type": "step", "data": action, "id": 2}
        first, before = await wire.ask(step), await read_state(wire)
        second, after = await wire.ask(step), await read_state(wire)
    if first != second:
        raise Wrong(f"the same request was answered with {told(first)} and then with {told(second)}")
    if before != after:
        raise Wrong(f"repeating a request changed the state to {shorten(str(after), 120)}")


# -- HTTP episodes ------------------------------------------------------------------------------------


@check("answer POST /reset and /step with observation, reward, done and metadata")
async def http_reset_and_step_are_answered(peer: Peer) -> None:
    await require_simulation(peer)
    async with http_episode(peer) as (reset, headers):
        require_body(reset, "/reset")
        require_body(await peer.post("/step", {"action": await peer.action()}, headers), "/step")


@check("answer a bad action on POST /step with 422 and a list of what is wrong")
async def http_refuses_a_bad_action(peer: Peer) -> None:
    await require_simulation(peer)
    for problem, action in await bad_actions(peer):
        reply = await peer.post("/step", {"action": action})
        if reply.status != 422 or not isinstance(field(reply, "detail"), list):
            raise Wrong(f"an action with {problem} is answered with {reply.short}")


@check(
    "hand out a Session-Id header in /reset, and let /step and /state go on with it",
    needs=[http_reset_and_step_are_answered],
    excuse=beyond_openenv,
)
async def http_calls_with_a_session_id_share_an_episode(peer: Peer) -> None:
    await require_simulation(peer)
    action = await peer.action()
    async with http_episode(peer) as (reset, headers):
        if not headers:
            raise Wrong("/reset hands out no Session-Id")
        require_body(reset, "/reset")
        before = await peer.get("/state", headers)
        require_body(await peer.post("/step", {"action": action}, headers), "/step")
        after = await peer.get("/state", headers)
    if field(before, "episode_id") != field(after, "episode_id"):
        raise Wrong("the episode_id changes between two requests of one session")
    if field(after, "step_count") != 1:
        raise Wrong(f"step_count is {field(after, 'step_count')!r} after one step")


# -- JSON-RPC -----------------------------------------------------------------------------------------


@check("answer tools/list with {'tools': [...]}, each with a name and an inputSchema")
async def mcp_lists_the_tools(peer: Peer) -> str:
    answer = await peer.rpc("tools/list")
    if code_of(answer) == -32603:
        raise Skipped("its environment has no tools")
    tools = answer["result"].get("tools") if isinstance(answer.get("result"), dict) else None
    if not isinstance(tools, list):
        raise Wrong(f"tools/list is answered with {told(answer)}")
    for tool in tools:
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("inputSchema"), dict):
            raise Wrong(f"a tool is listed as {told(tool)}")
    return f"{len(tools)} tools"


@check("answer tools/call with content, structured_content, data and is_error", needs=[mcp_lists_the_tools])
async def mcp_calls_a_tool(peer: Peer) -> str:
    name, result = await call_a_tool(peer)
    missing = {"content", "data", "is_error"} - result.keys()
    if missing:
        raise Wrong(f"the result has no {' and no '.join(sorted(missing))}: {told(result)}")
    return name


@check(
    "add the keys of the MCP specification to a result: isError and structuredContent",
    needs=[mcp_calls_a_tool],
    excuse=beyond_openenv,
)
async def results_have_the_keys_of_the_specification(peer: Peer) -> None:
    _, result = await call_a_tool(peer)
    if result.get("isError") is not False:
        raise Wrong(f"isError is {result.get('isError', 'missing')}")
    if "structuredContent" not in result:
        raise Wrong("structuredContent is missing")


@check(
    "answer initialize with protocolVersion, capabilities and serverInfo, so that MCP clients can connect",
    excuse=beyond_openenv,
)
async def mcp_initializes(peer: Peer) -> str:
    client = {"name": "paddock-check", "version": "1"}
    params = {"protocolVersion": MCP_VERSION, "capabilities": {}, "clientInfo": client}
    call = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    reply = await peer.post("/mcp", call)
    session = reply.headers.get("mcp-session-id")
    if session:
        await peer.request("DELETE", "/mcp", headers={"mcp-session-id": session})
    result = field(reply, "result")
    missing = {"protocolVersion", "capabilities", "serverInfo"} - (result if isinstance(result, dict) else {}).keys()
    if missing:
        raise Wrong(f"initialize is answered with {reply.short}")
    return f"speaks {result['protocolVersion']}"


@check("answer ping with an empty result", excuse=beyond_openenv)
async def mcp_answers_a_ping(peer: Peer) -> None:
    answer = await peer.rpc("ping")
    if answer.get("result") != {}:
        raise Wrong(f"ping is answered with {told(answer)}")


@check("take a notification (a request without an id) with 202 and no body", excuse=beyond_openenv)
async def a_notification_gets_no_answer(peer: Peer) -> None:
    reply = await peer.post("/mcp", {"jsonrpc": "2.0", "method": "notifications/initialized"})
    if reply.text:
        raise Wrong(f"it is answered with {reply.short}")


@check("answer a body that is no JSON with the error -32700")
async def broken_json_is_error_32700(peer: Peer) -> None:
    require_code(await peer.rpc_document(b"{"), -32700, "broken JSON")


@check("answer a document that is no JSON-RPC 2.0 request with the error -32600")
async def an_invalid_request_is_error_32600(peer: Peer) -> None:
    for document in ({}, *INVALID_REQUESTS):
        require_code(await peer.rpc_document(document), -32600, told(document))


@check("repeat the id of an invalid request wherever one can be read", excuse=beyond_openenv)
async def an_invalid_request_keeps_its_id(peer: Peer) -> None:
    for document in INVALID_REQUESTS:
        answer = await peer.rpc_document(document)
        if answer.get("id") != document["id"]:
            raise Wrong(f"{told(document)} is answered with id {answer.get('id')!r}")


@check("answer a method that is not there with the error -32601")
async def an_unknown_method_is_error_32601(peer: Peer) -> None:
    require_code(await peer.rpc("no/such/method"), -32601, "an unknown method")


@check("answer tools/call without a name, and an unknown session_id, with the error -32602")
async def bad_parameters_are_error_32602(peer: Peer) -> None:
    require_code(await peer.rpc("tools/call"), -32602, "tools/call without a name")
    answer = await peer.rpc("openenv/session/close", session_id=str(uuid.uuid4()))
    require_code(answer, -32602, "closing an unknown session")


@check("answer a call of a tool that is not there with the error -32602", excuse=beyond_openenv)
async def an_unknown_tool_is_error_32602(peer: Peer) -> None:
    await peer.tools()
    require_code(await peer.rpc("tools/call", name=MISSPELT, arguments={}), -32602, "an unknown tool")


@check(
    "let openenv/session/create make a session that /ws?session_id= joins and openenv/session/close ends",
    needs=[a_socket_gets_a_session],
)
async def a_created_session_can_be_joined_and_closed(peer: Peer) -> None:
    answer = await peer.rpc("openenv/session/create")
    if code_of(answer) == -32000:
        raise Skipped("the server is full")
    session = (answer.get("result") or {}).get("session_id")
    if not isinstance(session, str):
        raise Wrong(f"openenv/session/create is answered with {told(answer)}")
    try:
        async with peer.socket(f"/ws?session_id={session}") as wire:
            require_observation(await wire.ask({"type": "reset"}))
            wire.send({"type": "close"})
            await wire.goodbye()
    finally:
        closed = await peer.rpc("openenv/session/close", session_id=session)
    if (closed.get("result") or {}).get("session_id") != session:
        raise Wrong(f"openenv/session/close is answered with {told(closed)}")


@check("speak JSON-RPC on a WebSocket at /mcp as well", needs=[a_socket_gets_a_session])
async def the_mcp_socket_answers(peer: Peer) -> None:
    async with peer.socket("/mcp") as wire:
        answer = await wire.ask({"jsonrpc": "2.0", "id": 5, "method": "no/such/method"})
    if code_of(answer) == -32000:
        raise Skipped("the server is full")
    require_code(answer, -32601, "an unknown method")
    if answer.get("id") != 5:
        raise Wrong(f"the answer has the id {answer.get('id')!r}, not 5")


INVALID_REQUESTS: list[dict[str, Any]] = [
    {"jsonrpc": "1.0", "id": 7, "method": "tools/list"},
    {"jsonrpc": "2.0", "id": 7},
    {"jsonrpc": "2.0", "id": 7, "method": "tools/list", "params": []},
]


# -- how they look ------------------------------------------------------------------------------------


def field(reply: Reply, name: str) -> Any:
    return reply.document.get(name) if isinstance(reply.document, dict) else None


def told(document: Any) -> str:
    return shorten(str(document), 160)


def code_of(answer: dict[str, Any]) -> Any:
    error = answer.get("error")
    return error.get("code") if isinstance(error, dict) else None


def require_code(answer: dict[str, Any], code: int, what: str) -> None:
    if code_of(answer) != code:
        raise Wrong(f"{what} is answered with {told(answer)}")


def require_error(frame: dict[str, Any], code: str | None, what: str) -> None:
    if frame.get("type") != "error" or (code is not None and not is_error(frame, code)):
        raise Wrong(f"{what} is answered with {told(frame)}")


def require_observation(frame: dict[str, Any]) -> None:
    if frame.get("type") != "observation" or not isinstance(frame.get("data"), dict):
        raise Wrong(f"no observation came back, but {told(frame)}")
    require_fields(frame["data"], "the observation")


def require_body(reply: Reply, what: str) -> None:
    if reply.status != 200 or not isinstance(reply.document, dict):
        raise Wrong(f"{what} answers {reply.short}")
    if "metadata" not in reply.document:
        raise Wrong(f"{what} answers without metadata")
    require_fields(reply.document, what)


def require_fields(data: dict[str, Any], what: str) -> None:
    missing = {"observation", "reward", "done"} - data.keys()
    if missing:
        raise Wrong(f"{what} has no {' and no '.join(sorted(missing))}")
    if not isinstance(data["observation"], dict) or not isinstance(data["done"], bool):
        raise Wrong(f"{what} is {told(data)}")
    if data["reward"] is not None and not isinstance(data["reward"], Real):
        raise Wrong(f"{what} has the reward {data['reward']!r}")


async def require_refusals(peer: Peer, code: str | None, frames: list[Any]) -> None:
    """Each frame must be refused with `code`, the connection kept, and the state left as it was."""
    async with peer.session() as wire:
        await wire.ask({"type": "reset"})
        before = await read_state(wire)
        for frame in frames:
            require_error(await wire.ask(frame), code, shorten(str(frame), 60) or "an empty frame")
            if await read_state(wire) != before:
                raise Wrong(f"{shorten(str(frame), 60)} was refused, but changed the state")


async def require_simulation(peer: Peer) -> None:
    if not await peer.has_route("/step"):
        raise Skipped("the server offers no episodes over HTTP (production mode)")


async def read_state(wire: Wire) -> dict[str, Any]:
    frame = await wire.ask({"type": "state"})
    if frame.get("type") != "state" or not isinstance(frame.get("data"), dict):
        raise Wrong(f"state is answered with {told(frame)}")
    state: dict[str, Any] = frame["data"]
    return state


async def take_step(peer: Peer, wire: Wire, *, reset: bool = True) -> None:
    """Carry out the example action. Raises Doubtful if the environment, not the server, refuses it."""
    action = await peer.action()
    if reset:
        await wire.ask({"type": "reset"})
    frame = await wire.ask({"type": "step", "data": action})
    if is_error(frame, "EXECUTION_ERROR"):
        hint = "the environment fails on an action that its schema allows: `paddock check` its class"
        raise Doubtful(f"the example action {told(action)} failed: {frame['data'].get('message')}", hint)
    require_observation(frame)


async def bad_actions(peer: Peer) -> list[tuple[str, dict[str, Any]]]:
    try:
        found = list(counterexamples(await peer.schema()))
    except NoExample as error:
        raise Skipped(f"no example action can be made from the schema: {error}") from None
    if not found:
        raise Skipped("the schema allows every action")
    return found


async def call_a_tool(peer: Peer) -> tuple[str, dict[str, Any]]:
    name, arguments = await peer.tool_call()
    answer = await peer.rpc("tools/call", name=name, arguments=arguments)
    result = answer.get("result")
    if not isinstance(result, dict):
        message = (answer.get("error") or {}).get("message")
        raise Doubtful(f"{name} failed on the example call: {message or told(answer)}")
    return name, result


@asynccontextmanager
async def http_episode(peer: Peer) -> AsyncIterator[tuple[Reply, dict[str, str]]]:
    """The answer to `/reset` and the headers to go on with; the session, if there is one, is closed."""
    reset = await peer.post("/reset", {})
    session = reset.headers.get("session-id")
    try:
        yield reset, {"Session-Id": session} if session else {}
    finally:
        if session:
            await peer.rpc("openenv/session/close", session_id=session)
