"""Gymnasium's environments behind our server, and our server behind Gymnasium's interface."""

import json
import math
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy
import orjson
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from adapters.served import serving
from paddock import SyncClient
from paddock.adapters.gymnasium import RemoteEnv, RemoteVectorEnv
from paddock.adapters.gymnasium import spaces as paddock_spaces
from paddock.adapters.gymnasium.environment import environment_class, pixels_of_url, png_url
from paddock.envs.counter import Counter
from paddock.errors import ConfigError, InvalidMessage, TargetError
from paddock.protocol.codec import encode
from paddock.targets import load_target
from running import Running

CARTPOLE, _ = load_target("gymnasium:CartPole-v1")


class Everything(gymnasium.Env[Any, Any]):
    """Takes and shows every kind of space, and draws a frame."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012
    observation_space = spaces.Dict(
        {
            "picture": spaces.Box(0, 255, (4, 5, 3), numpy.uint8),
            "where": spaces.Box(-numpy.inf, numpy.inf, (2,), numpy.float32),
            "word": spaces.Text(8, min_length=0),
        }
    )
    action_space = spaces.Dict(
        {
            "move": spaces.Discrete(3, start=-1),
            "push": spaces.Box(-1.0, 1.0, (2,), numpy.float32),
            "both": spaces.Tuple([spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3])]),
            "say": spaces.Text(4, min_length=1),
        }
    )

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.taken: Any = None

    def _seen(self) -> dict[str, Any]:
        picture = self.np_random.integers(0, 255, (4, 5, 3), dtype=numpy.uint8)
        return {"picture": picture, "where": numpy.array([0.1, numpy.nan], numpy.float32), "word": "hi"}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._seen(), {"options": options, "odd": numpy.float32(0.5), "what": object}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return self._seen(), 2, False, action["move"] == 1, {"said": action["say"]}

    def render(self) -> Any:
        return numpy.arange(60, dtype=numpy.uint8).reshape(4, 5, 3)


gymnasium.register("PaddockEverything-v0", Everything)
EVERYTHING = environment_class("PaddockEverything-v0", {"render_mode": "rgb_array"})


@pytest.fixture(scope="module")
def cartpole() -> Iterator[Running]:
    with serving(CARTPOLE, max_sessions=8) as server:
        yield server


@pytest.fixture(scope="module")
def everything() -> Iterator[Running]:
    with serving(EVERYTHING) as server:
        yield server


def test_the_remote_trajectory_is_the_local_one(cartpole: Running) -> None:
    local, remote = gymnasium.make("CartPole-v1"), RemoteEnv(cartpole.url)
    local.action_space.seed(1)
    seed: int | None = 7
    for _ in range(3):
        ended = False
        ours, theirs = remote.reset(seed=seed), local.reset(seed=seed)
        numpy.testing.assert_array_equal(ours[0], theirs[0], strict=True)
        while not ended:
            action = local.action_space.sample()
            one, other = remote.step(action), local.step(action)
            numpy.testing.assert_array_equal(one[0], other[0], strict=True)
            assert one[1:] == other[1:]
            ended = one[2] or one[3]
        seed = None
    remote.close()
    remote.close()


def test_a_remote_environment_passes_gymnasiums_own_check(cartpole: Running) -> None:
    remote = RemoteEnv(cartpole.url)
    with warnings.catch_warnings(record=True) as reply:
        warnings.simplefilter("always")
        check_env(remote)
    remote.close()
    # These it says of CartPole itself, and of every environment that was not made by name.
    expected = ("infinity", "not having a spec")
    assert [text for each in reply if not any(word in (text := str(each.message)) for word in expected)] == []


def test_every_kind_of_space_comes_through(everything: Running) -> None:
    remote = RemoteEnv(everything.url)
    assert (remote.action_space, remote.observation_space) == (Everything.action_space, Everything.observation_space)
    seen, info = remote.reset(seed=1, options={"level": 2})
    assert info["options"] == {"level": 2}
    assert info["odd"] == 0.5
    assert "object" in info["what"]
    twin, _ = Everything().reset(seed=1)
    numpy.testing.assert_array_equal(seen["picture"], twin["picture"], strict=True)
    numpy.testing.assert_array_equal(seen["where"], twin["where"], strict=True)
    assert seen["word"] == "hi"
    remote.action_space.seed(3)
    for _ in range(20):
        action = remote.action_space.sample()
        _, reward, terminated, truncated, info = remote.step(action)
        assert (reward, terminated, truncated) == (2.0, False, action["move"] == 1)
        assert info == {"said": action["say"]}
    remote.close()


def test_a_frame_is_rendered_on_demand(everything: Running) -> None:
    remote = RemoteEnv(everything.url)
    remote.reset()
    numpy.testing.assert_array_equal(remote.render(), Everything().render(), strict=True)
    remote.close()


FINE = {"move": 0, "push": [0.5, -1], "both": [[0, 1, 1], [1, 2]], "say": "abc"}
WRONG = {
    "too large": ({**FINE, "move": 2}, "move: 2 is not between -1 and 1"),
    "not whole": ({**FINE, "move": 0.5}, "move: a whole number is needed, not 0.5"),
    "a truth": ({**FINE, "move": True}, "move: a whole number is needed, not True"),
    "out of the box": ({**FINE, "push": [0, 1.5]}, r"push\[1\]: 1.5 is not between -1.0 and 1.0"),
    "shape": ({**FINE, "push": [0]}, r"push: the shape is \(1,\), not \(2,\)"),
    "ragged": ({**FINE, "push": [0, [1]]}, r"push: numbers of shape \(2,\) are needed"),
    "words": ({**FINE, "push": ["a", "b"]}, "push: numbers are needed"),
    "binary": ({**FINE, "both": [[0, 1, 2], [1, 2]]}, r"both\[0\]\[2\]: 2 is not between 0 and 1"),
    "multi": ({**FINE, "both": [[0, 1, 1], [1, 3]]}, r"both\[1\]\[1\]: 3 is not between 0 and 2"),
    "short tuple": ({**FINE, "both": [[0, 1, 1]]}, "both: an array of 2 is needed"),
    "long text": ({**FINE, "say": "abcde"}, "say: 5 characters, not 1 to 4"),
    "odd text": ({**FINE, "say": "é"}, "say: the character 'é' is not allowed"),
    "missing": ({key: FINE[key] for key in ("move", "push", "both")}, "field 'say' is missing"),
    "unknown": ({**FINE, "jump": 1}, "unknown field 'jump'"),
    "no object": (3, "an object is needed, not 3"),
}


@pytest.mark.parametrize(("action", "explanation"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_action_is_refused_by_name(action: Any, explanation: str) -> None:
    with pytest.raises(paddock_spaces.NotInSpace, match=explanation):
        paddock_spaces.decode(Everything.action_space, action)


def test_a_refused_action_reaches_the_client_with_its_field(cartpole: Running) -> None:
    with SyncClient(cartpole.url) as client:
        client.reset()
        with pytest.raises(InvalidMessage) as caught:
            client.step({"action": 2})
        (problem,) = caught.value.data["errors"]
        assert problem["loc"] == ["action"]
        assert "2 is not between 0 and 1" in problem["msg"]


@pytest.mark.parametrize(
    ("action", "explanation"),
    [(9, "action: 9 is not between 0 and 1"), ("a", "not 'a'"), (None, "not None"), (1.5, "not 1.5"), ([1], "not")],
)
def test_a_remote_environment_reports_what_is_wrong_with_an_action(
    cartpole: Running, action: Any, explanation: str
) -> None:
    remote = RemoteEnv(cartpole.url)
    remote.reset()
    with pytest.raises(InvalidMessage, match=explanation):
        remote.step(action)
    remote.close()


@pytest.mark.parametrize("space", [Everything.action_space, Everything.observation_space], ids=["action", "seen"])
def test_samples_survive_the_wire(space: Any) -> None:
    space.seed(5)
    rebuilt = paddock_spaces.rebuild(paddock_spaces.describe(space))
    assert rebuilt == space
    for _ in range(50):
        sample = space.sample()
        sent = encode(paddock_spaces.encode(space, sample))
        assert (
            encode(paddock_spaces.encode(space, paddock_spaces.decode_unchecked(rebuilt, orjson.loads(sent)))) == sent
        )
        paddock_spaces.decode(space, orjson.loads(sent))


def test_a_frame_survives_its_url() -> None:
    for shape in ((3, 4), (3, 4, 3), (2, 2, 4)):
        frame = numpy.random.default_rng(0).integers(0, 255, shape, dtype=numpy.uint8)
        numpy.testing.assert_array_equal(pixels_of_url(png_url(frame)), frame, strict=True)


def test_a_vector_goes_the_way_of_gymnasiums_own(cartpole: Running) -> None:
    local = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    remote = RemoteVectorEnv(cartpole.url, 3)
    assert (remote.observation_space, remote.action_space) == (local.observation_space, local.action_space)
    numpy.testing.assert_array_equal(remote.reset(seed=4)[0], local.reset(seed=4)[0], strict=True)
    local.action_space.seed(9)
    endings = 0
    for _ in range(60):
        actions = local.action_space.sample()
        for one, other in zip(remote.step(actions)[:4], local.step(actions)[:4], strict=True):
            numpy.testing.assert_array_equal(one, other, strict=True)
        endings += int(remote._ended.sum())
    assert endings > 3
    remote.close()


def test_the_options_reach_make() -> None:
    made, name = load_target("gymnasium:CartPole-v1?max_episode_steps=3")
    assert name == "CartPole-v1"
    with SyncClient(made) as client:
        client.reset(seed=1)
        seen = [client.step({"action": step % 2}) for step in range(3)]
    assert [result.done for result in seen] == [False, False, True]
    assert seen[-1].observation.truncated
    assert not seen[-1].observation.terminated


@pytest.mark.parametrize("target", ["gymnasium:NoSuch-v9", "gymnasium:CartPole-v1?colour=red", "gymnasium:"])
def test_an_unknown_gymnasium_id_is_reported(target: str) -> None:
    with pytest.raises(TargetError) as caught:
        load_target(target)
    assert caught.value.hint


def test_a_server_without_spaces_is_reported() -> None:
    with serving(Counter) as server, pytest.raises(ConfigError, match="publishes no Gymnasium spaces"):
        RemoteEnv(server.url)


@pytest.mark.parametrize("value", [[None, 0.0], [math.nan, 0.0], [math.inf, 0.0]])
@pytest.mark.parametrize("bound", [1.0, math.inf])
def test_an_action_of_a_box_is_finite(value: list[Any], bound: float) -> None:
    with pytest.raises(paddock_spaces.NotInSpace, match=r"\[0\]: a finite number is needed"):
        paddock_spaces.decode(spaces.Box(-bound, bound, (2,), numpy.float32), value)


def test_a_box_without_bounds_can_be_described() -> None:
    endless = spaces.Box(-numpy.inf, numpy.inf, (2,), numpy.float32)
    assert (
        paddock_spaces.rebuild(json.loads(json.dumps(paddock_spaces.describe(endless), allow_nan=False))) == endless
    )
