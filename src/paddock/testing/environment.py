"""What an environment class must get right, check by check.

The order matters: what later checks need comes first, and the first calls of `reset` and `step` run on a thread with
a deadline, so that a class which hangs is detected before it can block the others.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from itertools import pairwise
from numbers import Real
from statistics import median
from time import perf_counter

import orjson

from paddock.protocol.codec import encode
from paddock.sessions.spec import Affinity, Where
from paddock.testing.checks import Doubtful, Skipped, Suite, Wrong
from paddock.testing.environment_subject import (
    HEARTBEAT_SECONDS,
    SEED,
    EnvironmentSubject,
    ExampleAction,
    NoExampleAction,
    beat,
    field,
    play,
    played,
    refuse_actions,
    refuse_calls,
    require_fit,
    require_same,
    require_survival,
    seen,
    takes,
    visible,
)
from paddock.testing.schema_examples import has_type
from paddock.types import Action

INLINE_SECONDS = 0.005
BLOCKED_SECONDS = 0.050
TIMED_STEPS = 5

ENVIRONMENT: Suite[EnvironmentSubject] = Suite()
check = ENVIRONMENT.check


@check("the class needs reset and step, and a constructor that works without arguments")
async def it_can_be_built(subject: EnvironmentSubject) -> None:
    await subject.prepare()
    async with subject.instance():
        pass


@check("annotate fields with types that pydantic can describe as JSON Schema", needs=[it_can_be_built])
async def its_schemas_can_be_produced(subject: EnvironmentSubject) -> None:
    encode(subject.spec.schemas())


@check("write a docstring, or define get_metadata()", needs=[it_can_be_built])
async def it_describes_itself(subject: EnvironmentSubject) -> str:
    async with subject.instance() as instance:
        described = await instance.metadata()
    if not described.name:
        raise Wrong("its metadata has no name")
    if described.description in ("", f"{described.name} environment"):
        raise Doubtful("it does not say what it is")
    return str(described.name)


@check("return an instance of the observation type that the class declares", needs=[it_can_be_built])
async def reset_returns_the_observation_type(subject: EnvironmentSubject) -> None:
    async with subject.instance() as instance:
        observation = await instance.reset()
    require_fit(observation, subject.spec.reset_observation_type)


@check(
    "draw everything random from random.Random(seed), made anew in each reset",
    needs=[reset_returns_the_observation_type],
)
async def the_same_seed_gives_the_same_first_observation(subject: EnvironmentSubject) -> None:
    if not takes(subject.spec.reset, "seed"):
        raise Skipped("reset takes no seed")
    async with subject.instance() as instance:
        first, second = await instance.reset(seed=SEED), await instance.reset(seed=SEED)
    require_same(seen(first), seen(second), "a second reset with the same seed")
    async with subject.instance() as other:
        third = await other.reset(seed=SEED)
    require_same(seen(first), seen(third), "another instance with the same seed")


@check(
    "say what to try: Field(examples=[...]) on the fields of the action, or on a tool's arguments",
    needs=[its_schemas_can_be_produced],
)
async def an_example_action_can_be_made_from_the_schema(subject: EnvironmentSubject) -> str | None:
    examples = await subject.example_actions()
    if not examples:
        raise Wrong("it offers no tools", "mark the methods that agents may call with @tool")
    if not subject.spec.has_tools and subject.spec.action_type is Action:
        hint = "derive from Environment[YourAction, YourObservation, YourState]"
        raise Wrong("the class does not say what its actions look like", hint)
    missing = [example_action for example_action in examples if isinstance(example_action, NoExampleAction)]
    if missing:
        raise Doubtful(
            "; ".join(f"none for {example_action.name}: {example_action.reason}" for example_action in missing)
        )
    return None if subject.spec.has_tools else str(orjson.dumps((await subject.example_action()).document).decode())


@check(
    "answer a bad move with an observation that says so, narrow the schema, or give Field(examples=[...])",
    needs=[reset_returns_the_observation_type, its_schemas_can_be_produced],
)
async def a_step_with_an_example_action_works(subject: EnvironmentSubject) -> None:
    if subject.spec.has_tools:
        raise Skipped("its tools are called one by one")
    example_action = await subject.example_action()
    async with subject.instance() as instance:
        await instance.reset(seed=SEED)
        await instance.step(subject.action(example_action))


@check(
    "a tool may fail, but not on its own examples: give its arguments Field(examples=[...])",
    needs=[reset_returns_the_observation_type, an_example_action_can_be_made_from_the_schema],
)
async def each_tool_answers_an_example_call(subject: EnvironmentSubject) -> str:
    if not subject.spec.has_tools:
        raise Skipped("it has no tools")
    called = [
        example_action
        for example_action in await subject.example_actions()
        if isinstance(example_action, ExampleAction)
    ]
    failures = []
    for example_action in called:
        async with subject.instance() as instance:
            await instance.reset(seed=SEED)
            observation = await instance.step(subject.action(example_action))
        error = field(observation, "error")
        if error is not None:
            failures.append(f"{example_action.name}: {field(error, 'message')}")
    if failures:
        raise Doubtful("; ".join(failures))
    return f"{len(called)} called"


STEPS = (a_step_with_an_example_action_works, each_tool_answers_an_example_call)


@check("return an instance of the observation type that the class declares", needs=STEPS)
async def step_returns_the_observation_type(subject: EnvironmentSubject) -> None:
    for _, observation in await played(subject):
        require_fit(observation, subject.spec.observation_type)


@check('return a finite number, or None for "not scored"', needs=STEPS)
async def rewards_are_numbers_or_none(subject: EnvironmentSubject) -> None:
    for name, observation in await played(subject, with_reset=True):
        reward = field(observation, "reward")
        if reward is None:
            continue
        if not isinstance(reward, Real):
            raise Wrong(f"the reward of {name} is {reward!r}, a {type(reward).__name__}")
        if not math.isfinite(reward):
            raise Wrong(f"the reward of {name} is {reward}, and a server refuses it: the step fails")


@check("set done to True or False", needs=STEPS)
async def done_is_true_or_false(subject: EnvironmentSubject) -> None:
    for name, observation in await played(subject, with_reset=True):
        done = field(observation, "done")
        if not isinstance(done, bool):
            raise Wrong(f"done of {name} is {done!r}, a {type(done).__name__}")


@check("use types that JSON can carry and that read back as what they were", needs=STEPS)
async def observations_survive_json(subject: EnvironmentSubject) -> None:
    for name, observation in await played(subject, with_reset=True):
        kind = subject.spec.observation_type if name != "reset" else subject.spec.reset_observation_type
        require_survival(observation, kind, f"the observation of {name}")


@check("use types that JSON can carry and that read back as what they were", needs=STEPS)
async def the_state_survives_json(subject: EnvironmentSubject) -> str | None:
    async with subject.instance() as instance:
        await instance.reset(seed=SEED)
        await instance.step(subject.action(await subject.example_action()))
        state = await instance.state()
    if state is None:
        return "kept by the server"
    require_survival(state, subject.spec.state_type, "the state")
    return None


SESSION_STEPS = (the_state_survives_json, rewards_are_numbers_or_none)
"""A session refuses a step whose reward is not finite: that is one defect, and one failed check."""


@check(
    "derive the state from paddock.State, set episode_id in reset and add 1 to step_count in step",
    needs=SESSION_STEPS,
)
async def the_state_has_an_episode_id_and_counts_steps(subject: EnvironmentSubject) -> None:
    async with subject.session() as session:
        await session.reset()
        before = await session.state()
        await session.step((await subject.example_action()).document)
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
async def reading_the_state_changes_nothing(subject: EnvironmentSubject) -> None:
    async with subject.session() as session:
        await session.reset(seed=SEED)
        first, second = await session.state(), await session.state()
    require_same(first, second, "a second look at the state")


@check(
    "set everything back in reset, and take over the episode_id it is given",
    needs=[the_state_has_an_episode_id_and_counts_steps],
)
async def reset_begins_a_new_episode(subject: EnvironmentSubject) -> None:
    async with subject.session() as session:
        await session.reset(episode_id="first")
        await session.step((await subject.example_action()).document)
        await session.reset(episode_id="second")
        state = await session.state()
    if state["step_count"] != 0:
        raise Wrong(f"step_count is {state['step_count']} after a reset")
    if state["episode_id"] != "second":
        raise Doubtful(f"reset(episode_id='second') left the episode_id at {state['episode_id']!r}")


@check("write a docstring under each @tool method: it is all that an agent knows of it", needs=[it_can_be_built])
async def tools_have_descriptions(subject: EnvironmentSubject) -> None:
    bare = [tool.name for tool in await subject.tools() if not tool.description.strip()]
    if bare:
        raise Wrong(f"without a description: {', '.join(bare)}")


@check("annotate every argument of a tool with its type", needs=[it_can_be_built])
async def arguments_of_tools_have_types(subject: EnvironmentSubject) -> None:
    bare = [
        f"{tool.name}({name})"
        for tool in await subject.tools()
        for name, schema in tool.input_schema.get("properties", {}).items()
        if not has_type(schema, tool.input_schema)
    ]
    if bare:
        raise Wrong(f"without a type: {', '.join(bare)}")


@check(
    "derive the action from paddock.Action, and let its fields (not step) decide what is allowed",
    needs=[the_state_survives_json],
)
async def a_bad_action_is_refused_and_changes_nothing(subject: EnvironmentSubject) -> str:
    async with subject.session() as session:
        await session.reset(seed=SEED)
        before = await session.state()
        if subject.spec.has_tools:
            refused = await refuse_calls(session, await subject.tools())
        else:
            refused = await refuse_actions(session, subject.spec.schemas()["action"])
        require_same(before, await session.state(), "the state after refused actions")
    if not refused:
        raise Doubtful("it takes every action: nothing is ever wrong")
    return f"refused: {', '.join(refused)}"


@check("close may be called before the first reset: release only what is there", needs=[it_can_be_built])
async def close_works_before_the_first_reset(subject: EnvironmentSubject) -> None:
    async with subject.instance() as instance:
        await instance.close()


@check("close must release everything whatever happened before it", needs=[reset_returns_the_observation_type])
async def close_works_after_a_failed_step(subject: EnvironmentSubject) -> None:
    async with subject.instance() as instance:
        await instance.reset(seed=SEED)
        with suppress(Exception):
            await instance.step(object())
        await instance.close()


@check(
    "keep what an episode changes on the instance (set it in __init__), not on the class or the module; "
    "or drop concurrent_sessions = True",
    needs=SESSION_STEPS,
)
async def sessions_share_nothing(subject: EnvironmentSubject) -> None:
    if not subject.spec.concurrent:
        raise Skipped("it grants one session at a time: set concurrent_sessions = True to serve more")
    example_action = await subject.example_action()
    alone = [await play(subject, example_action) for _ in range(2)]
    async with subject.session() as session, subject.session() as other:
        first = await session.reset(seed=SEED)
        before = await session.state()
        for _ in range(2):
            await other.reset(seed=SEED)
            await other.step(example_action.document)
        require_same(before, await session.state(), "the state after another session acted")
        together = [visible(first), visible(await session.step(example_action.document))]
    if alone[0] == alone[1]:
        require_same(alone[0], together, "an episode while another session acted")


@check(
    "a server calls it from any of its threads: set thread_affine = True to be called from one only",
    needs=STEPS,
)
async def any_thread_may_call_it(subject: EnvironmentSubject) -> None:
    if subject.spec.affinity is not Affinity.ANY:
        raise Skipped("it asks for a thread of its own")
    example_action = await subject.example_action()
    async with subject.instance(on_any_thread=True) as instance:
        await instance.reset(seed=SEED)
        await instance.step(subject.action(example_action))
        await instance.state()
        await instance.close()


@check("drop inline = True: the calls then run on threads and hold nobody up", needs=STEPS)
async def calls_are_as_fast_as_declared(subject: EnvironmentSubject) -> str:
    example_action = await subject.example_action()
    async with subject.instance() as instance:
        for _ in range(TIMED_STEPS):
            await instance.reset(seed=SEED)
            await instance.step(subject.action(example_action))
            await instance.state()
    typical = {name: median(seconds) for name, seconds in instance.seconds.items()}
    timings = ", ".join(f"{name} {seconds * 1e3:.2g} ms" for name, seconds in typical.items())
    if getattr(subject.spec.cls, "inline", False) and max(typical.values()) > INLINE_SECONDS:
        raise Doubtful(f"it declares inline = True, but takes {timings}")
    return timings


@check("await what takes long, or write plain `def` methods: those run on threads", needs=STEPS)
async def async_methods_leave_the_loop_free(subject: EnvironmentSubject) -> None:
    methods = (subject.spec.reset, subject.spec.step)
    if not any(method.where is Where.LOOP for method in methods):
        raise Skipped("its methods are not async")
    async with subject.instance() as instance:
        beats = [perf_counter()]
        heart = asyncio.create_task(beat(beats))
        await asyncio.sleep(HEARTBEAT_SECONDS)
        await instance.reset(seed=SEED)
        await instance.step(subject.action(await subject.example_action()))
        beats.append(perf_counter())
        heart.cancel()
    longest = max(later - earlier for earlier, later in pairwise(beats))
    if longest > BLOCKED_SECONDS:
        raise Doubtful(f"everything else stood still for {longest * 1e3:.0f} ms")


@check(
    "return the declared types themselves: a client reads every observation and state as those",
    needs=[observations_survive_json, *SESSION_STEPS],
)
async def a_client_can_play_an_episode(subject: EnvironmentSubject) -> None:
    example_action = await subject.example_action()
    async with subject.client() as client:
        await client.reset(seed=SEED)
        await client.step(example_action.document)
        await client.state()
