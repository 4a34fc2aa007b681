from collections.abc import Iterator

import pytest

from .instances import KEY, MANAGER, TOKEN, Instance, running


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with running(tmp_path_factory.mktemp("notes")) as instance:
        yield instance


@pytest.fixture
def notes(shared: Instance) -> Instance:
    """An instance of the notes at the beginning of an episode."""
    assert shared.post(f"{MANAGER}/reset")["success"]
    return shared


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """An instance with a key and a runner token."""
    with running(tmp_path_factory.mktemp("locked"), api_key=KEY, runner_token=TOKEN) as instance:
        yield instance
