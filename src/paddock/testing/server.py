"""What a server must get right on the OpenEnv wire, check by check.

Runs against any server that speaks it. Where Paddock promises more than OpenEnv does, a failure of
another server is only a note.
"""

from __future__ import annotations

import uuid
from typing import Any

from paddock.testing.checks import Doubtful, Skipped, Suite, Wrong, shorten
from paddock.testing.schema_examples import UNKNOWN_NAME
from paddock.testing.server_subject import (
    ServerSubject,
    bad_actions,
    call_a_tool,
    code_of,
    field,
    http_episode,
    read_state,
    require_body,
    require_code,
    require_error,
    require_observation,
    require_refusals,
    require_simulation,
    short,
    take_step,
)

DEEP = 10_000
MCP_VERSION = "2025-06-18"

SERVER: Suite[ServerSubject] = Suite()
check = SERVER.check


def beyond_openenv(subject: ServerSubject) -> str | None:
    return None if subject.is_paddock else "beyond OpenEnv"


# -- GET ----------------------------------------------------------------------------------------------


@check("answer GET /health with 200 and {'status': 'healthy'}")
async def health_is_healthy(subject: ServerSubject) -> None:
    reply = await subject.get("/health")
    if reply.status != 200 or field(reply, "status") != "healthy":
        raise Wrong(f"/health answers {reply.short}")


@check("answer GET /metadata with at least a name and a description")
async def metadata_names_the_environment(subject: ServerSubject) -> str:
    reply = await subject.get("/metadata")
    if reply.status != 200 or not all(isinstance(field(reply, name), str) for name in ("name", "description")):
        raise Wrong(f"/metadata answers {reply.short}")
    return str(field(reply, "name"))


@check("answer GET /schema with a JSON Schema under each of action, observation and state")
async def schema_describes_the_environment(subject: ServerSubject) -> None:
    reply = await subject.get("/schema")
    missing = [name for name in ("action", "observation", "state") if not isinstance(field(reply, name), dict)]
    if reply.status != 200 or missing:
        raise Wrong(f"/schema has no {' and no '.join(missing) or 'answer'}: {reply.short}")


@check("list /reset, /step and /state in /openapi.json, or none of them in production mode")
async def openapi_lists_the_routes(subject: ServerSubject) -> str:
    reply = await subject.get("/openapi.json")
    paths, about = field(reply, "paths"), field(reply, "info")
    if not isinstance(paths, dict) or not isinstance(about, dict) or not isinstance(about.get("version"), str):
        raise Wrong(f"/openapi.json answers {reply.short}")
    listed = [path for path in ("/reset", "/step", "/state") if path in paths]
    if len(listed) not in (0, 3):
        raise Wrong(f"only {' and '.join(listed)} listed")
    return "simulation mode" if listed else "production mode"


# -- /ws ----------------------------------------------------------------------------------------------


@check("accept WebSockets at /ws, and give each a session of its own")
async def a_socket_gets_a_session(subject: ServerSubject) -> None:
    async with subject.session():
        pass


@check(
    "answer {'type':'reset'} with {'type':'observation','data':{observation, reward, done}}",
    needs=[a_socket_gets_a_session],
)
async def reset_is_answered_with_an_observation(subject: ServerSubject) -> None:
    async with subject.session() as socket:
        require_observation(await socket.request({"type": "reset"}))


@check(
    "answer {'type':'step','data':ACTION} with {'type':'observation','data':{observation, reward, done}}",
    needs=[reset_is_answered_with_an_observation],
)
async def step_is_answered_with_an_observation(subject: ServerSubject) -> None:
    async with subject.session() as socket:
        await take_step(subject, socket)


@check(
    "answer {'type':'state'} with an object that has episode_id and step_count, and count each step",
    needs=[step_is_answered_with_an_observation],
)
async def state_tells_the_episode_and_its_steps(subject: ServerSubject) -> None:
    episode_id = f"check-{uuid.uuid4()}"
    async with subject.session() as socket:
        await socket.request({"type": "reset", "data": {"episode_id": episode_id}})
        before = await read_state(socket)
        await take_step(subject, socket, reset=False)
        after = await read_state(socket)
    missing = [name for name in ("episode_id", "step_count") if name not in after]
    if missing:
        raise Wrong(f"the state has no {' and no '.join(missing)}")
    if (before["step_count"], after["step_count"]) != (0, 1):
        raise Doubtful(f"step_count is {before['step_count']} after reset, {after['step_count']} after a step")
    if after["episode_id"] != episode_id:
        raise Doubtful(f"reset(episode_id={episode_id!r}) left the episode_id at {after['episode_id']!r}")


@check("carry out the requests of a socket one after the other", needs=[a_socket_gets_a_session])
async def requests_sent_ahead_are_answered_in_order(subject: ServerSubject) -> None:
    async with subject.session() as socket:
        for kind in ("state", "reset", "state"):
            socket.send({"type": kind})
        kinds = [(await socket.receive()).get("type") for _ in range(3)]
    if kinds != ["state", "observation", "state"]:
        raise Wrong(f"state, reset, state were answered with {', '.join(map(str, kinds))}")


@check("answer with the code INVALID_JSON and keep the connection", needs=[a_socket_gets_a_session])
async def text_that_is_no_json_is_refused(subject: ServerSubject) -> None:
    await require_refusals(subject, "INVALID_JSON", ["", "{", "no json"])


@check("answer with the code UNKNOWN_TYPE and keep the connection", needs=[a_socket_gets_a_session])
async def an_unknown_type_is_refused(subject: ServerSubject) -> None:
    await require_refusals(subject, "UNKNOWN_TYPE", [{"type": "bogus"}, {"data": {}}, {"type": None}])


@check("answer with the code VALIDATION_ERROR and keep the connection", needs=[a_socket_gets_a_session])
async def a_bad_envelope_is_refused(subject: ServerSubject) -> None:
    frames = [{"type": "step"}, {"type": "state", "data": {}}, {"type": "reset", "data": [], "extra": 1}]
    await require_refusals(subject, "VALIDATION_ERROR", frames)


@check(
    "validate an action before the environment sees it: VALIDATION_ERROR, and nothing has happened",
    needs=[a_socket_gets_a_session],
)
async def a_bad_action_is_refused(subject: ServerSubject) -> str:
    bad = await bad_actions(subject)
    await require_refusals(subject, "VALIDATION_ERROR", [{"type": "step", "data": action} for _, action in bad])
    return f"refused: {', '.join(problem for problem, _ in bad)}"


@check(
    "answer JSON that is no object with an error, and keep the connection",
    needs=[a_socket_gets_a_session],
    excuse=beyond_openenv,
)
async def an_array_keeps_the_connection(subject: ServerSubject) -> None:
    await require_refusals(subject, None, ["[]", "3", "null", '"text"'])


@check(
    "answer a binary frame with an error, and keep the connection",
    needs=[a_socket_gets_a_session],
    excuse=beyond_openenv,
)
async def a_binary_frame_keeps_the_connection(subject: ServerSubject) -> None:
    await require_refusals(subject, None, [b"\x00\xff"])


@check(
    "answer JSON that is too deep with an error, and keep the connection",
    needs=[a_socket_gets_a_session],
    excuse=beyond_openenv,
)
async def deep_json_keeps_the_connection(subject: ServerSubject) -> None:
    await require_refusals(subject, None, ["[" * DEEP + "]" * DEEP])


@check("answer {'type':'close'} by closing with code 1000", needs=[a_socket_gets_a_session])
async def close_is_answered_by_closing(subject: ServerSubject) -> None:
    async with subject.session() as socket:
        socket.send({"type": "close"})
        wait_closed = await socket.wait_closed()
    if wait_closed.code != 1000:
        raise Wrong(f"the server closed with code {wait_closed.code}")


@check("answer /ws?session_id=UNKNOWN with the code SESSION_ERROR, and close")
async def an_unknown_session_id_is_refused(subject: ServerSubject) -> None:
    async with subject.socket(f"/ws?session_id={uuid.uuid4()}") as socket:
        require_error(await socket.receive(), "SESSION_ERROR", "an unknown session_id")
        await socket.wait_closed()


# -- after a drop -------------------------------------------------------------------------------------


@check("free the slot of a socket that vanished", needs=[reset_is_answered_with_an_observation])
async def a_new_episode_begins_after_a_dropped_socket(subject: ServerSubject) -> None:
    async with subject.session() as socket:
        await socket.request({"type": "reset"})
        socket.socket.abort()
        await socket.wait_closed()
    try:
        async with subject.session() as socket:
            require_observation(await socket.request({"type": "reset"}))
    except Skipped as full:
        raise Wrong(f"after the drop, {full.detail}") from None


@check(
    "hand out a Session-Id to a client that sends 'Session-Resume: new', and let it return with it",
    needs=[step_is_answered_with_an_observation],
    excuse=beyond_openenv,
)
async def a_step_goes_on_after_a_dropped_socket(subject: ServerSubject) -> None:
    async with subject.session({"Session-Resume": "new"}) as socket:
        token = socket.socket.headers.get("Session-Id")
        if token is None:
            raise Wrong("the server hands out no Session-Id to return with")
        await take_step(subject, socket)
        before = await read_state(socket)
        socket.socket.abort()
        await socket.wait_closed()
    async with subject.socket(headers={"Session-Resume": token}) as socket:
        again = await read_state(socket)
        if again != before:
            raise Wrong(
                f"the state was {shorten(str(before), 120)}, and is {shorten(str(again), 120)} after the drop"
            )
        await take_step(subject, socket, reset=False)


@check(
    "keep the answers to numbered requests, and repeat them instead of acting twice",
    needs=[step_is_answered_with_an_observation],
    excuse=beyond_openenv,
)
async def a_repeated_request_is_not_carried_out_twice(subject: ServerSubject) -> None:
    action = await subject.action()
    async with subject.session({"Session-Resume": "new"}) as socket:
        require_observation(await socket.request({"type": "reset", "id": 1}))
        step = {"type": "step", "data": action, "id": 2}
        first, before = await socket.request(step), await read_state(socket)
        second, after = await socket.request(step), await read_state(socket)
    if first != second:
        raise Wrong(f"the same request was answered with {short(first)} and then with {short(second)}")
    if before != after:
        raise Wrong(f"repeating a request changed the state to {shorten(str(after), 120)}")


# -- HTTP episodes ------------------------------------------------------------------------------------


@check("answer POST /reset and /step with observation, reward, done and metadata")
async def http_reset_and_step_are_answered(subject: ServerSubject) -> None:
    await require_simulation(subject)
    async with http_episode(subject) as (reset, headers):
        require_body(reset, "/reset")
        require_body(await subject.post("/step", {"action": await subject.action()}, headers), "/step")


@check("answer a bad action on POST /step with 422 and a list of what is wrong")
async def http_refuses_a_bad_action(subject: ServerSubject) -> None:
    await require_simulation(subject)
    for problem, action in await bad_actions(subject):
        reply = await subject.post("/step", {"action": action})
        if reply.status != 422 or not isinstance(field(reply, "detail"), list):
            raise Wrong(f"an action with {problem} is answered with {reply.short}")


@check(
    "hand out a Session-Id header in /reset, and let /step and /state go on with it",
    needs=[http_reset_and_step_are_answered],
    excuse=beyond_openenv,
)
async def http_calls_with_a_session_id_share_an_episode(subject: ServerSubject) -> None:
    await require_simulation(subject)
    action = await subject.action()
    async with http_episode(subject) as (reset, headers):
        if not headers:
            raise Wrong("/reset hands out no Session-Id")
        require_body(reset, "/reset")
        before = await subject.get("/state", headers)
        require_body(await subject.post("/step", {"action": action}, headers), "/step")
        after = await subject.get("/state", headers)
    if field(before, "episode_id") != field(after, "episode_id"):
        raise Wrong("the episode_id changes between two requests of one session")
    if field(after, "step_count") != 1:
        raise Wrong(f"step_count is {field(after, 'step_count')!r} after one step")


# -- JSON-RPC -----------------------------------------------------------------------------------------


@check("answer tools/list with {'tools': [...]}, each with a name and an inputSchema")
async def mcp_lists_the_tools(subject: ServerSubject) -> str:
    answer = await subject.rpc("tools/list")
    if code_of(answer) == -32603:
        raise Skipped("its environment has no tools")
    tools = answer["result"].get("tools") if isinstance(answer.get("result"), dict) else None
    if not isinstance(tools, list):
        raise Wrong(f"tools/list is answered with {short(answer)}")
    for tool in tools:
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("inputSchema"), dict):
            raise Wrong(f"a tool is listed as {short(tool)}")
    return f"{len(tools)} tools"


@check("answer tools/call with content, structured_content, data and is_error", needs=[mcp_lists_the_tools])
async def mcp_calls_a_tool(subject: ServerSubject) -> str:
    name, result = await call_a_tool(subject)
    missing = {"content", "data", "is_error"} - result.keys()
    if missing:
        raise Wrong(f"the result has no {' and no '.join(sorted(missing))}: {short(result)}")
    return name


@check(
    "add the keys of the MCP specification to a result: isError and structuredContent",
    needs=[mcp_calls_a_tool],
    excuse=beyond_openenv,
)
async def results_have_the_keys_of_the_specification(subject: ServerSubject) -> None:
    _, result = await call_a_tool(subject)
    if result.get("isError") is not False:
        raise Wrong(f"isError is {result.get('isError', 'missing')}")
    if "structuredContent" not in result:
        raise Wrong("structuredContent is missing")


@check(
    "answer initialize with protocolVersion, capabilities and serverInfo, so that MCP clients can connect",
    excuse=beyond_openenv,
)
async def mcp_initializes(subject: ServerSubject) -> str:
    client = {"name": "paddock-check", "version": "1"}
    params = {"protocolVersion": MCP_VERSION, "capabilities": {}, "clientInfo": client}
    call = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    reply = await subject.post("/mcp", call)
    session = reply.headers.get("mcp-session-id")
    if session:
        await subject.request("DELETE", "/mcp", headers={"mcp-session-id": session})
    result = field(reply, "result")
    missing = {"protocolVersion", "capabilities", "serverInfo"} - (result if isinstance(result, dict) else {}).keys()
    if missing:
        raise Wrong(f"initialize is answered with {reply.short}")
    return f"speaks {result['protocolVersion']}"


@check("answer ping with an empty result", excuse=beyond_openenv)
async def mcp_answers_a_ping(subject: ServerSubject) -> None:
    answer = await subject.rpc("ping")
    if answer.get("result") != {}:
        raise Wrong(f"ping is answered with {short(answer)}")


@check("take a notification (a request without an id) with 202 and no body", excuse=beyond_openenv)
async def a_notification_gets_no_answer(subject: ServerSubject) -> None:
    reply = await subject.post("/mcp", {"jsonrpc": "2.0", "method": "notifications/initialized"})
    if reply.text:
        raise Wrong(f"it is answered with {reply.short}")


@check("answer a body that is no JSON with the error -32700")
async def broken_json_is_error_32700(subject: ServerSubject) -> None:
    require_code(await subject.rpc_document(b"{"), -32700, "broken JSON")


@check("answer a document that is no JSON-RPC 2.0 request with the error -32600")
async def an_invalid_request_is_error_32600(subject: ServerSubject) -> None:
    for document in ({}, *INVALID_REQUESTS):
        require_code(await subject.rpc_document(document), -32600, short(document))


@check("repeat the id of an invalid request wherever one can be read", excuse=beyond_openenv)
async def an_invalid_request_keeps_its_id(subject: ServerSubject) -> None:
    for document in INVALID_REQUESTS:
        answer = await subject.rpc_document(document)
        if answer.get("id") != document["id"]:
            raise Wrong(f"{short(document)} is answered with id {answer.get('id')!r}")


@check("answer a method that is not there with the error -32601")
async def an_unknown_method_is_error_32601(subject: ServerSubject) -> None:
    require_code(await subject.rpc("no/such/method"), -32601, "an unknown method")


@check("answer tools/call without a name, and an unknown session_id, with the error -32602")
async def bad_parameters_are_error_32602(subject: ServerSubject) -> None:
    require_code(await subject.rpc("tools/call"), -32602, "tools/call without a name")
    answer = await subject.rpc("openenv/session/close", session_id=str(uuid.uuid4()))
    require_code(answer, -32602, "closing an unknown session")


@check("answer a call of a tool that is not there with the error -32602", excuse=beyond_openenv)
async def an_unknown_tool_is_error_32602(subject: ServerSubject) -> None:
    await subject.tools()
    require_code(await subject.rpc("tools/call", name=UNKNOWN_NAME, arguments={}), -32602, "an unknown tool")


@check(
    "let openenv/session/create make a session that /ws?session_id= joins and openenv/session/close ends",
    needs=[a_socket_gets_a_session],
)
async def a_created_session_can_be_joined_and_closed(subject: ServerSubject) -> None:
    answer = await subject.rpc("openenv/session/create")
    if code_of(answer) == -32000:
        raise Skipped("the server is full")
    session = (answer.get("result") or {}).get("session_id")
    if not isinstance(session, str):
        raise Wrong(f"openenv/session/create is answered with {short(answer)}")
    try:
        async with subject.socket(f"/ws?session_id={session}") as socket:
            require_observation(await socket.request({"type": "reset"}))
            socket.send({"type": "close"})
            await socket.wait_closed()
    finally:
        closed = await subject.rpc("openenv/session/close", session_id=session)
    if (closed.get("result") or {}).get("session_id") != session:
        raise Wrong(f"openenv/session/close is answered with {short(closed)}")


@check("speak JSON-RPC on a WebSocket at /mcp as well", needs=[a_socket_gets_a_session])
async def the_mcp_socket_answers(subject: ServerSubject) -> None:
    async with subject.socket("/mcp") as socket:
        answer = await socket.request({"jsonrpc": "2.0", "id": 5, "method": "no/such/method"})
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
