"""What an environment class must get right, check by check.

The order matters a little: what later checks build on comes first, and the first calls of `reset` and
`step` run on a thread with a deadline, so that a class which hangs is found out before it can block us.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from itertools import pairwise
from numbers import Real
from statistics import median
from time import perf_counter
from typing import Any

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError

from paddock.errors import InvalidMessage, PaddockError, ToolFailure
from paddock.protocol.codec import encode, model_fields
from paddock.sessions.blueprint import Affinity, Where
from paddock.testing.checks import Doubtful, Skipped, Suite, Wrong
from paddock.testing.examples import MISSPELT, counterexamples, has_type
from paddock.testing.trial import Move, NoMove, Session, Trial, first_problem, takes
from paddock.types import Action, Observation

SEED = 7
INLINE_LIMIT = 0.005
BLOCKED_LIMIT = 0.050
HEARTBEAT = 0.005
TIMED_STEPS = 5

ENVIRONMENT: Suite[Trial] = Suite()
check = ENVIRONMENT.check


@check("the class needs reset and step, and a constructor that works without arguments")
async def it_can_be_built(trial: Trial) -> None:
    await trial.prepare()
    async with trial.instance():
        pass


@check("annotate fields with types that pydantic can describe as JSON Schema", needs=[it_can_be_built])
async def its_schemas_can_be_produced(trial: Trial) -> None:
    encode(trial.blueprint.schemas())


@check("write a docstring, or define get_metadata()", needs=[it_can_be_built])
async def it_describes_itself(trial: Trial) -> str:
    async with trial.instance() as instance:
        described = await instance.metadata()
    if not described.name:
        raise Wrong("its metadata has no name")
    if described.description in ("", f"{described.name} environment"):
        raise Doubtful("it does not say what it is")
    return str(described.name)


@check("return an instance of the observation type that the class declares", needs=[it_can_be_built])
async def reset_returns_the_observation_type(trial: Trial) -> None:
    async with trial.instance() as instance:
        observation = await instance.reset()
    require_fit(observation, trial.blueprint.reset_observation_type)


@check(
    "draw everything random from random.Random(seed), made anew in each reset",
    needs=[reset_returns_the_observation_type],
)
async def the_same_seed_gives_the_same_first_observation(trial: Trial) -> None:
    if not takes(trial.blueprint.reset, "seed"):
        raise Skipped("reset takes no seed")
    async with trial.instance() as instance:
        first, second = await instance.reset(seed=SEED), await instance.reset(seed=SEED)
    require_same(seen(first), seen(second), "a second reset with the same seed")
    async with trial.instance() as other:
        third = await other.reset(seed=SEED)
    require_same(seen(first), seen(third), "another instance with the same seed")


@check(
    "say what to try: Field(examples=[...]) on the fields of the action, or on a tool's arguments",
    needs=[its_schemas_can_be_produced],
)
async def an_example_action_can_be_made_from_the_schema(trial: Trial) -> str | None:
    moves = await trial.moves()
    if not moves:
        raise Wrong("it offers no tools", "mark the methods that agents may call with @tool")
    if not trial.blueprint.has_tools and trial.blueprint.action_type is Action:
        hint = "derive from Environment[YourAction, YourObservation, YourState]"
        raise Wrong("the class does not say what its actions look like", hint)
    missing = [move for move in moves if isinstance(move, NoMove)]
    if missing:
        raise Doubtful("; ".join(f"none for {move.name}: {move.reason}" for move in missing))
    return None if trial.blueprint.has_tools else str(orjson.dumps((await trial.move()).document).decode())


@check(
    "answer a bad move with an observation that says so, narrow the schema, or give Field(examples=[...])",
    needs=[reset_returns_the_observation_type, its_schemas_can_be_produced],
)
async def a_step_with_an_example_action_works(trial: Trial) -> None:
    if trial.blueprint.has_tools:
        raise Skipped("its tools are called one by one")
    move = await trial.move()
    async with trial.instance() as instance:
        await instance.reset(seed=SEED)
        await instance.step(trial.action(move))


@check(
    "a tool may fail, but not on its own examples: give its arguments Field(examples=[...])",
    needs=[reset_returns_the_observation_type, an_example_action_can_be_made_from_the_schema],
)
async def each_tool_answers_an_example_call(trial: Trial) -> str:
    if not trial.blueprint.has_tools:
        raise Skipped("it has no tools")
    called = [move for move in await trial.moves() if isinstance(move, Move)]
    failures = []
    for move in called:
        async with trial.instance() as instance:
            await instance.reset(seed=SEED)
            observation = await instance.step(trial.action(move))
        error = field(observation, "error")
        if error is not None:
            failures.append(f"{move.name}: {field(error, 'message')}")
    if failures:
        raise Doubtful("; ".join(failures))
    return f"{len(called)} called"


STEPS = (a_step_with_an_example_action_works, each_tool_answers_an_example_call)


@check("return an instance of the observation type that the class declares", needs=STEPS)
async def step_returns_the_observation_type(trial: Trial) -> None:
    for _, observation in await played(trial):
        require_fit(observation, trial.blueprint.observation_type)


@check('return a finite number, or None for "not scored"', needs=STEPS)
async def rewards_are_numbers_or_none(trial: Trial) -> None:
    for name, observation in await played(trial, with_reset=True):
        reward = field(observation, "reward")
        if reward is None:
            continue
        if not isinstance(reward, Real):
            raise Wrong(f"the reward of {name} is {reward!r}, a {type(reward).__name__}")
        if not math.isfinite(reward):
            raise Wrong(f"the reward of {name} is {reward}, and a server refuses it: the step fails")


@check("set done to True or False", needs=STEPS)
async def done_is_true_or_false(trial: Trial) -> None:
    for name, observation in await played(trial, with_reset=True):
        done = field(observation, "done")
        if not isinstance(done, bool):
            raise Wrong(f"done of {name} is {done!r}, a {type(done).__name__}")


@check("use types that JSON can carry and that read back as what they were", needs=STEPS)
async def observations_survive_json(trial: Trial) -> None:
    for name, observation in await played(trial, with_reset=True):
        kind = trial.blueprint.observation_type if name != "reset" else trial.blueprint.reset_observation_type
        require_survival(observation, kind, f"the observation of {name}")


@check("use types that JSON can carry and that read back as what they were", needs=STEPS)
async def the_state_survives_json(trial: Trial) -> str | None:
    async with trial.instance() as instance:
        await instance.reset(seed=SEED)
        await instance.step(trial.action(await trial.move()))
        state = await instance.state()
    if state is None:
        return "kept by the server"
    require_survival(state, trial.blueprint.state_type, "the state")
    return None


SESSION_STEPS = (the_state_survives_json, rewards_are_numbers_or_none)
"""A session refuses a step whose reward is not finite: that is one defect, and one failed check."""


@check(
    "derive the state from paddock.State, set episode_id in reset and add 1 to step_count in step",
    needs=SESSION_STEPS,
)
async def the_state_has_an_episode_id_and_counts_steps(trial: Trial) -> None:
    async with trial.session() as session:
        await session.reset()
        before = await session.state()
        await session.step((await trial.move()).document)
        after = await session.state()
    for name in ("episode_id", "step_count"):
        if name not in after:
            raise Wrong(f"the state has no {name}")
    counted = (before["step_count"], after["step_count"])
    if counted != (0, 1):
        raise Wrong(f"step_count is {counted[0]!r} after reset and {counted[1]!r} after one step")
    if not isinstance(after["episode_id"], str):
        raise Doubtful(f"episode_id is {after['episode_id']!r} during an episode")


@check("compute the state without changing anything", needs=[the_state_survives_json])
async def reading_the_state_changes_nothing(trial: Trial) -> None:
    async with trial.session() as session:
        await session.reset(seed=SEED)
        first, second = await session.state(), await session.state()
    require_same(first, second, "a second look at the state")


@check(
    "set everything back in reset, and take over the episode_id it is given",
    needs=[the_state_has_an_episode_id_and_counts_steps],
)
async def reset_begins_a_new_episode(trial: Trial) -> None:
    async with trial.session() as session:
        await session.reset(episode_id="first")
        await session.step((await trial.move()).document)
        await session.reset(episode_id="second")
        state = await session.state()
    if state["step_count"] != 0:
        raise Wrong(f"step_count is {state['step_count']} after a reset")
    if state["episode_id"] != "second":
        raise Doubtful(f"reset(episode_id='second') left the episode_id at {state['episode_id']!r}")


@check("write a docstring under each @tool method: it is all that an agent knows of it", needs=[it_can_be_built])
async def tools_have_descriptions(trial: Trial) -> None:
    bare = [tool.name for tool in await trial.tools() if not tool.description.strip()]
    if bare:
        raise Wrong(f"without a description: {', '.join(bare)}")


@check("annotate every argument of a tool with its type", needs=[it_can_be_built])
async def arguments_of_tools_have_types(trial: Trial) -> None:
    bare = [
        f"{tool.name}({name})"
        for tool in await trial.tools()
        for name, schema in tool.input_schema.get("properties", {}).items()
        if not has_type(schema, tool.input_schema)
    ]
    if bare:
        raise Wrong(f"without a type: {', '.join(bare)}")


@check(
    "derive the action from paddock.Action, and let its fields (not step) decide what is allowed",
    needs=[the_state_survives_json],
)
async def a_bad_action_is_refused_and_changes_nothing(trial: Trial) -> str:
    async with trial.session() as session:
        await session.reset(seed=SEED)
        before = await session.state()
        if trial.blueprint.has_tools:
            refused = await refuse_calls(session, await trial.tools())
        else:
            refused = await refuse_actions(session, trial.blueprint.schemas()["action"])
        require_same(before, await session.state(), "the state after refused actions")
    if not refused:
        raise Doubtful("it takes every action: nothing is ever wrong")
    return f"refused: {', '.join(refused)}"


@check("close may be called before the first reset: release only what is there", needs=[it_can_be_built])
async def close_works_before_the_first_reset(trial: Trial) -> None:
    async with trial.instance() as instance:
        await instance.close()


@check("close must release everything whatever happened before it", needs=[reset_returns_the_observation_type])
async def close_works_after_a_failed_step(trial: Trial) -> None:
    async with trial.instance() as instance:
        await instance.reset(seed=SEED)
        with suppress(Exception):
            await instance.step(object())
        await instance.close()


@check(
    "keep what an episode changes on the instance (set it in __init__), not on the class or the module; "
    "or drop concurrent_sessions = True",
    needs=SESSION_STEPS,
)
async def sessions_share_nothing(trial: Trial) -> None:
    if not trial.blueprint.concurrent:
        raise Skipped("it grants one session at a time: set concurrent_sessions = True to serve more")
    move = await trial.move()
    alone = [await play(trial, move) for _ in range(2)]
    async with trial.session() as watched, trial.session() as other:
        first = await watched.reset(seed=SEED)
        before = await watched.state()
        for _ in range(2):
            await other.reset(seed=SEED)
            await other.step(move.document)
        require_same(before, await watched.state(), "the state after another session acted")
        together = [visible(first), visible(await watched.step(move.document))]
    if alone[0] == alone[1]:
        require_same(alone[0], together, "an episode while another session acted")


@check(
    "a server calls it from any of its threads: set thread_affine = True to be called from one only",
    needs=STEPS,
)
async def any_thread_may_call_it(trial: Trial) -> None:
    if trial.blueprint.affinity is not Affinity.ANY:
        raise Skipped("it asks for a thread of its own")
    move = await trial.move()
    async with trial.instance(wandering=True) as instance:
        await instance.reset(seed=SEED)
        await instance.step(trial.action(move))
        await instance.state()
        await instance.close()


@check("drop inline = True: the calls then run on threads and hold nobody up", needs=STEPS)
async def calls_are_as_fast_as_declared(trial: Trial) -> str:
    move = await trial.move()
    async with trial.instance() as instance:
        for _ in range(TIMED_STEPS):
            await instance.reset(seed=SEED)
            await instance.step(trial.action(move))
            await instance.state()
    typical = {name: median(seconds) for name, seconds in instance.seconds.items()}
    told = ", ".join(f"{name} {seconds * 1e3:.2g} ms" for name, seconds in typical.items())
    if getattr(trial.blueprint.cls, "inline", False) and max(typical.values()) > INLINE_LIMIT:
        raise Doubtful(f"it declares inline = True, but takes {told}")
    return told


@check("await what takes long, or write plain `def` methods: those run on threads", needs=STEPS)
async def async_methods_leave_the_loop_free(trial: Trial) -> None:
    methods = (trial.blueprint.reset, trial.blueprint.step)
    if not any(method.where is Where.LOOP for method in methods):
        raise Skipped("its methods are not async")
    async with trial.instance() as instance:
        beats = [perf_counter()]
        heart = asyncio.create_task(beat(beats))
        await asyncio.sleep(HEARTBEAT)
        await instance.reset(seed=SEED)
        await instance.step(trial.action(await trial.move()))
        beats.append(perf_counter())
        heart.cancel()
    longest = max(later - earlier for earlier, later in pairwise(beats))
    if longest > BLOCKED_LIMIT:
        raise Doubtful(f"everything else stood still for {longest * 1e3:.0f} ms")


@check(
    "return the declared types themselves: a client reads every observation and state as those",
    needs=[observations_survive_json, *SESSION_STEPS],
)
async def a_client_can_play_an_episode(trial: Trial) -> None:
    move = await trial.move()
    async with trial.client() as client:
        await client.reset(seed=SEED)
        await client.step(move.document)
        await client.state()


# -- how they look ------------------------------------------------------------------------------------


async def played(trial: Trial, *, with_reset: bool = False) -> list[tuple[str, Any]]:
    """What came back from each example action, in an episode of its own, with the name of the call."""
    answers = []
    for move in [await trial.move()] if not trial.blueprint.has_tools else await trial.moves():
        if isinstance(move, NoMove):
            continue
        async with trial.instance() as instance:
            first = await instance.reset(seed=SEED)
            second = await instance.step(trial.action(move))
        answers += [("reset", first)] if with_reset else []
        answers.append((move.name, second))
    return answers


async def play(trial: Trial, move: Move) -> list[Any]:
    """What a client sees of a short episode that nobody disturbs."""
    async with trial.session() as session:
        return [visible(await session.reset(seed=SEED)), visible(await session.step(move.document))]


async def refuse_actions(session: Session, schema: dict[str, Any]) -> list[str]:
    """What is wrong with the actions that were refused. Raises Wrong if a bad one is taken."""
    refused = []
    for problem, document in counterexamples(schema):
        try:
            await session.step(document)
        except InvalidMessage:
            refused.append(problem)
        else:
            raise Wrong(f"an action with {problem} was carried out")
    return refused


async def refuse_calls(session: Session, tools: list[Any]) -> list[str]:
    """Like `refuse_actions`, for calls of tools."""
    calls: list[tuple[str, str, dict[str, Any]]] = [("a tool that is not there", MISSPELT, {})]
    for tool in tools[:1]:
        calls += [(problem, tool.name, arguments) for problem, arguments in counterexamples(tool.input_schema)]
    refused = []
    for problem, name, arguments in calls:
        try:
            await session.call_tool(name, arguments)
        except (ToolFailure, InvalidMessage):
            refused.append(problem)
        else:
            raise Wrong(f"a call with {problem} was carried out")
    return refused


async def beat(beats: list[float]) -> None:
    while True:
        beats.append(perf_counter())
        await asyncio.sleep(HEARTBEAT)


def field(value: Any, name: str) -> Any:
    """A field of a model or of a dict."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def seen(observation: Any) -> Any:
    """What of an observation must not depend on chance. Metadata may hold times and names."""
    return {key: value for key, value in carried(observation).items() if key != "metadata"}


def visible(data: dict[str, Any]) -> Any:
    """Like `seen`, for the data of a frame."""
    fields = {key: value for key, value in data["observation"].items() if key != "metadata"}
    return {"observation": fields, "reward": data["reward"], "done": data["done"]}


def carried(value: Any) -> dict[str, Any]:
    """The fields of a model as JSON brings them to the other side."""
    fields: dict[str, Any] = orjson.loads(encode(model_fields(value)))
    return fields


def require_same(expected: Any, found: Any, what: str) -> None:
    if expected == found:
        return
    if isinstance(expected, dict) and isinstance(found, dict):
        changed = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
        expected, found = ({key: side.get(key) for key in changed} for side in (expected, found))
    raise Wrong(f"{what} differs: {told(found)}, not {told(expected)}")


def require_fit(value: Any, kind: Any) -> None:
    """`value` must be what the class declares: an instance of `kind`, or a dict of its fields."""
    if isinstance(kind, type) and isinstance(value, kind):
        return
    if kind is Observation and isinstance(value, BaseModel) and hasattr(value, "done"):
        return
    name = getattr(kind, "__name__", str(kind))
    if isinstance(kind, type) and not isinstance(value, dict):
        raise Wrong(f"{type(value).__name__} came back, {name} is declared")
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise Wrong(f"what came back does not fit {name}: {first_problem(error)}") from None


def require_survival(value: Any, declared: Any, what: str) -> None:
    """What is read back from JSON must be what was written."""
    kind = type(value) if isinstance(value, BaseModel) else declared
    try:
        sent = carried(value)
    except PaddockError as error:
        raise Wrong(f"{what} cannot be written: {error}", error.hint) from None
    try:
        again = TypeAdapter(kind).validate_python(sent)
    except ValidationError as error:
        raise Wrong(f"{what} cannot be read back: {first_problem(error)}") from None
    require_same(sent, carried(again), f"{what}, read back and written again,")


def told(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 120 else text[:119] + "…"
