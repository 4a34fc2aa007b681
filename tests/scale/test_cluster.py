import socket
import sys

import pytest

from paddock.errors import ClusterError, ConfigError
from paddock.scale import cluster
from paddock.scale.cluster import Resources, parse_resources


def test_resources_are_translated_for_ray() -> None:
    plain = Resources()
    assert plain.options() == {"num_cpus": 1.0}
    assert plain.bundle() == {"CPU": 1.0}
    rich = Resources(0.5, 1024, {"sandbox_bwrap": 1})
    assert rich.options() == {"num_cpus": 0.5, "memory": 1024, "resources": {"sandbox_bwrap": 1}}
    assert rich.bundle() == {"CPU": 0.5, "memory": 1024.0, "sandbox_bwrap": 1}


def test_custom_resources_are_read_from_json() -> None:
    assert parse_resources(None) == {}
    assert parse_resources('{"gpu_node": 2}') == {"gpu_node": 2.0}


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": "many"}', "3"])
def test_what_names_no_resources_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no resources"):
        parse_resources(text)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError) as refusal:
        cluster.connect()
    assert refusal.value.hint == "pip install 'paddock-rl[ray]'"


def test_a_cluster_that_is_not_there_is_reported_at_once() -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{used.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"no Ray cluster at {nobody}") as refusal:
            cluster.connect(nobody)
    assert "ray start" in str(refusal.value.hint)
