from collections.abc import Iterator

import pytest

from .processes import Server, fastmcp_command, free_port, openenv_command, paddock_command, serving

LONGEST_FIRST = (
    *("test_ray_faults", "test_agents", "test_rollout_cheats", "test_rollout_faults", "test_ray_rollouts"),
    *("test_rollouts", "test_opencode_environment", "test_trainers", "test_ray_hosts", "test_trl", "test_e2b"),
    *("test_page", "test_vendor_agents", "test_page_finding", "test_vendor_clients", "test_adapters"),
    "test_grpo_tiny",
)
"""Files that take long begin early, so that none of them is left alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def counter_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("servers") / "paddock_counter.log"
    with serving("paddock", paddock_command("counter", port), port, log, ends_with=0) as server:
        yield server


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("servers") / "paddock_echo.log"
    with serving("paddock", paddock_command("echo", port), port, log, ends_with=0) as server:
        yield server


@pytest.fixture(scope="session")
def openenv_counter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("servers") / "openenv_counter.log"
    with serving("openenv", openenv_command("openenv", "counter", port), port, log) as server:
        yield server


@pytest.fixture(scope="session")
def openenv_echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("servers") / "openenv_echo.log"
    with serving("openenv", openenv_command("openenv", "echo", port), port, log) as server:
        yield server


@pytest.fixture(scope="session")
def fastmcp_echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("servers") / "fastmcp_echo.log"
    with serving("fastmcp", fastmcp_command(port), port, log) as server:
        yield server


@pytest.fixture(scope="session", params=["counter_server", "openenv_counter"], ids=["paddock", "openenv"])
def counter(request: pytest.FixtureRequest) -> Server:
    """The counter, by Paddock and by the oracle."""
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="session", params=["echo_server", "openenv_echo"], ids=["paddock", "openenv"])
def echo(request: pytest.FixtureRequest) -> Server:
    """The echo tools, by Paddock and by the oracle."""
    server: Server = request.getfixturevalue(request.param)
    return server
