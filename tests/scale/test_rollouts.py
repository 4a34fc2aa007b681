"""`paddock rollout --engine`: from its options to an engine."""

import pytest

from paddock.cli.rollout import choose_backend
from paddock.errors import ConfigError
from paddock.rollouts.api import find_placement
from paddock.rollouts.config import RunConfig
from paddock.scale.cluster import Resources
from paddock.scale.rollouts import RayBackend

NOTHING = {"address": None, "cpus": None, "memory": None, "custom": None, "per_node": None}


def test_options_of_a_cluster_become_its_engine() -> None:
    values = {"address": "head:6379", "cpus": 0.5, "memory": 1024, "custom": '{"sandbox_bwrap": 1}', "per_node": 4}
    resources = Resources(0.5, 1024 * 1024 * 1024, {"sandbox_bwrap": 1.0})
    assert choose_backend("ray", **values) == RayBackend("head:6379", resources, 4)
    assert choose_backend("ray", **NOTHING) == RayBackend() == find_placement("ray")


def test_without_a_cluster_they_are_refused() -> None:
    assert choose_backend("local", **NOTHING) == "local"
    with pytest.raises(ConfigError) as caught:
        choose_backend("local", **{**NOTHING, "cpus": 2.0})
    assert caught.value.hint == "add --engine ray"


def test_an_engine_is_found_by_its_name() -> None:
    assert find_placement("local") is None
    with pytest.raises(ConfigError, match="no engine 'slurm'"):
        RunConfig(model="demo", engine="slurm")
