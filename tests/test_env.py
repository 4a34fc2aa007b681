"""What an author writes: types from generics, metadata, tool environments."""

import asyncio
from typing import Any, Generic, TypeVar

import pytest

from environments import Add, Adder, AsyncKit, Kit, Script, Sum, Total
from paddock import Action, Environment, Observation, State, ToolEnvironment, ToolReturn, tool
from paddock.errors import ConfigError, EnvironmentFailure, InvalidToolArguments, ToolFailure, ToolNotFound
from paddock.sessions.spec import Affinity, EnvironmentSpec, Where
from paddock.types import CallToolAction, CallToolObservation, ListToolsAction

ObservationT = TypeVar("ObservationT", bound=Observation)
ActionT = TypeVar("ActionT", bound=Action)


def types_of(cls: Any) -> tuple[Any, Any, Any]:
    return cls.action_type, cls.observation_type, cls.state_type


# -- generics -------------------------------------------------------------------------------------


def test_the_types_come_from_the_brackets() -> None:
    class Plain(Environment[Add, Total, Sum]):
        pass

    assert types_of(Plain) == (Add, Total, Sum)


def test_a_subclass_keeps_them() -> None:
    class Child(Adder):
        pass

    class Grandchild(Child):
        pass

    assert types_of(Grandchild) == (Add, Total, Sum)


def test_without_brackets_the_base_types_hold() -> None:
    class Plain(Environment):  # type: ignore[type-arg]
        pass

    assert types_of(Plain) == (Action, Observation, State)


def test_a_class_attribute_wins() -> None:
    class Own(Environment[Add, Total, Sum]):
        action_type = Script

    assert Own.action_type is Script


def test_a_class_attribute_is_inherited() -> None:
    class Middle(Adder):
        action_type = Script

    class Leaf(Middle):
        pass

    assert Leaf.action_type is Script


def test_types_may_be_filled_in_one_by_one() -> None:
    class Middle(Environment[Add, ObservationT, State], Generic[ObservationT]):
        pass

    class Leaf(Middle[Total]):
        pass

    assert types_of(Leaf) == (Add, Total, State)


def test_types_may_be_filled_in_in_another_order() -> None:
    class Middle(Environment[ActionT, ObservationT, State], Generic[ObservationT, ActionT]):
        pass

    class Leaf(Middle[Total, Add]):
        pass

    assert types_of(Leaf) == (Add, Total, State)


def test_a_mixin_may_stand_first() -> None:
    class Mixin:
        pass

    class Mixed(Mixin, Environment[Add, Total, Sum]):
        pass

    assert types_of(Mixed) == (Add, Total, Sum)


# -- the class ------------------------------------------------------------------------------------


def test_an_environment_without_methods_says_what_is_missing() -> None:
    class Empty(Environment[Add, Total, Sum]):
        pass

    with pytest.raises(EnvironmentFailure, match=r"Empty has no reset\(\)"):
        Empty().reset()
    with pytest.raises(EnvironmentFailure, match=r"Empty has no step\(\)"):
        Empty().step(Add(amount=1))


def test_metadata_is_name_and_docstring() -> None:
    class Bare(Environment[Add, Total, Sum]):
        pass

    class BareTools(ToolEnvironment):
        pass

    assert Adder().get_metadata().description == "Adds on a thread."
    assert Bare().get_metadata().description == "Bare environment"
    assert BareTools().get_metadata().description == "BareTools environment"


def test_openenvs_names_mean_the_same() -> None:
    class Theirs:
        SUPPORTS_CONCURRENT_SESSIONS = True
        REQUIRES_SINGLE_THREAD_EXECUTOR = True

        def reset(self, seed: Any = None, episode_id: Any = None, **kwargs: Any) -> Any: ...

        def step(self, action: Any, timeout_s: Any = None, **kwargs: Any) -> Any: ...

        async def step_async(self, action: Any, timeout_s: Any = None, **kwargs: Any) -> Any: ...

        @property
        def state(self) -> Sum:
            return Sum()

    spec = EnvironmentSpec(Theirs, action_type=Add)
    assert spec.concurrent
    assert spec.affinity is Affinity.SHARED
    assert spec.state_type is Sum
    assert (spec.reset.where, spec.step.where) == (Where.THREAD, Where.LOOP)


def test_openenvs_constructor_arguments_are_taken() -> None:
    class Own(Environment[Add, Total, Sum]):
        pass

    own = Own(transform=str, rubric="r")
    assert (own.transform, own.rubric) == (str, "r")


def test_an_instance_is_not_a_class() -> None:
    with pytest.raises(ConfigError, match="instance"):
        EnvironmentSpec(Adder())  # type: ignore[arg-type]


def test_a_class_without_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="reset"):
        EnvironmentSpec(dict)


def test_a_factory_is_called_once_to_find_its_class(lives: list[Any]) -> None:
    spec = EnvironmentSpec(lambda: Adder())
    assert spec.cls is Adder
    assert [life.closes for life in lives] == [1]


def test_a_factory_with_an_async_close_is_closed_too(lives: list[Any]) -> None:
    class AsyncClose(Adder):
        async def close(self) -> None:  # type: ignore[override]
            super().close()

    EnvironmentSpec(lambda: AsyncClose())
    assert [life.closes for life in lives] == [1]


def test_a_partial_of_a_class_is_that_class(lives: list[Any]) -> None:
    from functools import partial

    assert EnvironmentSpec(partial(Adder)).cls is Adder
    assert lives == []


def test_the_schemas_name_the_arguments_of_reset() -> None:
    assert EnvironmentSpec(Adder).schemas()["reset"] == {
        "type": "object",
        "properties": {"seed": {}, "episode_id": {}},
        "additionalProperties": False,
    }


# -- tool environments ----------------------------------------------------------------------------


def test_a_tool_environment_lists_its_tools() -> None:
    listing = Kit().step(ListToolsAction())
    assert [info["name"] for info in listing.tools] == ["add", "pause", "fail", "win", "look"]  # type: ignore[attr-defined]


def test_a_tool_is_called_through_step() -> None:
    seen = Kit().step(CallToolAction(tool_name="add", arguments={"amount": 2}))
    assert isinstance(seen, CallToolObservation)
    assert seen.result["data"] == 2
    assert seen.error is None


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("nope", {}, "tool_not_found"),
        ("add", {"amount": "x"}, "invalid_args"),
        ("fail", {"text": "file not found"}, "execution_error"),
        ("fail", {"text": "invalid argument"}, "execution_error"),
    ],
)
def test_a_failure_is_an_observation_with_its_kind(name: str, arguments: dict[str, Any], kind: str) -> None:
    seen = Kit().step(CallToolAction(tool_name=name, arguments=arguments))
    assert isinstance(seen, CallToolObservation)
    assert seen.error is not None
    assert (seen.error.error_type, seen.reward, seen.done) == (kind, None, False)


def test_call_tool_raises_what_went_wrong() -> None:
    kit = Kit()
    assert kit.call_tool("add", {"amount": 2}) == 2
    with pytest.raises(ToolNotFound, match="nope"):
        kit.call_tool("nope", {})
    with pytest.raises(InvalidToolArguments, match="amount"):
        kit.call_tool("add", {})
    with pytest.raises(ToolFailure, match=r"RuntimeError: token=\*\*\*"):
        kit.call_tool("fail", {"text": "token=hunter2"})


def test_an_attribute_that_is_missing_on_the_environment_points_to_reset() -> None:
    class Counts(ToolEnvironment):
        @tool
        def add(self) -> int:
            self.count += 1  # type: ignore[attr-defined]
            return 0

        @tool
        def of_another(self) -> int:
            return None.count  # type: ignore[attr-defined,no-any-return]

    with pytest.raises(ToolFailure, match=r"'count'\. If reset sets it, call reset first"):
        Counts().call_tool("add", {})
    with pytest.raises(ToolFailure, match=r"'count'$"):
        Counts().call_tool("of_another", {})


def test_a_tool_that_raises_a_tool_failure_keeps_it() -> None:
    class Own(ToolEnvironment):
        @tool
        def own(self) -> str:
            raise InvalidToolArguments("not this one")

    seen = Own().step(CallToolAction(tool_name="own"))
    assert seen.error.error_type == "invalid_args"  # type: ignore[attr-defined]


def test_a_tool_may_score_and_end() -> None:
    seen = Kit().step(CallToolAction(tool_name="win", arguments={"points": 2}))
    assert (seen.reward, seen.done, seen.result["data"]) == (2.0, True, "won")  # type: ignore[attr-defined]


def test_async_tools_are_awaited() -> None:
    kit = AsyncKit()
    seen: Any = asyncio.run(kit.step_async(CallToolAction(tool_name="add", arguments={"amount": 3})))
    assert seen.result["data"] == 3
    assert AsyncKit.has_async_tools()
    assert not Kit.has_async_tools()


def test_calling_an_async_tool_from_a_plain_step_is_a_clear_error() -> None:
    with pytest.raises(ToolFailure, match="async"):
        AsyncKit().call_tool("add", {"amount": 1})


def test_inline_with_async_tools_is_refused() -> None:
    with pytest.raises(ConfigError, match="inline"):

        class Wrong(ToolEnvironment):
            inline = True

            @tool
            async def slow(self) -> str:
                return "x"


def test_a_subclass_has_its_parents_tools_and_its_own() -> None:
    class More(Kit):
        @tool
        def extra(self) -> str:
            return "x"

        @tool
        def look(self) -> dict[str, int]:
            """Look closer."""
            return {"count": -1}

    assert list(More.tools) == ["add", "pause", "fail", "win", "look", "extra"]
    assert More.tools["look"].description == "Look closer."
    assert "extra" not in Kit.tools


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools"):

        class Twice(ToolEnvironment):
            @tool(name="same")
            def one(self) -> str:
                return "1"

            @tool(name="same")
            def two(self) -> str:
                return "2"


def test_a_tool_environment_may_keep_state_of_its_own() -> None:
    class Stateful(Kit):
        @property
        def state(self) -> Sum:
            return Sum(total=self.count)

    assert EnvironmentSpec(Stateful).state_type is Sum


def test_tool_return_is_a_value() -> None:
    assert ToolReturn("x") == ToolReturn("x", None, False)


# -- which action a payload is --------------------------------------------------------------------


class Free(Environment):  # type: ignore[type-arg]
    """Takes any action."""

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return Observation()

    def step(self, action: Any) -> Observation:
        return Observation()


def routed(make: Any, **payload: Any) -> Any:
    return EnvironmentSpec(make).wire.parse_action(payload)


def test_the_base_action_is_an_action() -> None:
    assert type(routed(Free)) is Action
    assert routed(Free, metadata={"a": 1}) == Action(metadata={"a": 1})


def test_the_base_action_may_be_a_tool_action() -> None:
    assert routed(Free, type="list_tools") == ListToolsAction()
    assert routed(Free, type="call_tool", tool_name="t") == CallToolAction(tool_name="t")


def test_a_tool_environment_needs_no_type() -> None:
    assert routed(Kit, tool_name="t") == CallToolAction(tool_name="t")
    assert routed(Kit, type="list_tools") == ListToolsAction()


def test_an_action_of_ones_own_decides_by_itself() -> None:
    class Typed(Action):
        type: str

    class Own(Free, Environment[Typed, Observation, State]):
        pass

    assert routed(Own, type="list_tools") == Typed(type="list_tools")
