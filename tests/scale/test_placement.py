"""Which nodes are avoided, and what is submitted again, without a cluster."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from paddock.errors import ConfigError, SandboxError
from paddock.scale.node_link import connect_to_driver
from paddock.scale.placement import NODE_LABEL, ClusterNodes, RolloutPlacement
from paddock.scale.rollout_service import RolloutService, RolloutTicket

pytest.importorskip("ray")

from ray.exceptions import RayTaskError, WorkerCrashedError

from paddock.scale.cluster import Resources
from paddock.scale.rollouts import RayBackend

ResultT = TypeVar("ResultT")
NEEDS = {"CPU": 1.0}


def run(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    return asyncio.run(asyncio.wait_for(work, 10))


def three_nodes(**more: float) -> ClusterNodes:
    """Nobody listens at their addresses."""
    place = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 1}
    nodes = ClusterNodes({name: {"Resources": {"CPU": 2.0}, **place} for name in ("a", "b", "c")})
    nodes.members["c"]["Resources"] = {"CPU": 2.0, **more}
    return nodes


def test_a_lost_node_is_avoided_by_all_for_a_while() -> None:
    nodes = three_nodes()
    nodes.mark_lost("a", now=100.0)
    assert nodes.avoided("task/0", NEEDS, now=101.0) == {"a"}
    assert nodes.avoided("task/0", NEEDS, now=200.0) == set()


def test_a_node_that_lost_a_worker_is_avoided_by_that_member_only() -> None:
    nodes = three_nodes()
    nodes.avoid_for("a", "task/0")
    assert nodes.avoided("task/0", NEEDS, now=0.0) == {"a"}
    assert nodes.avoided("task/1", NEEDS, now=0.0) == set()


def test_the_only_node_that_fits_is_not_avoided() -> None:
    nodes = three_nodes(gpu=1.0)
    needs = {"CPU": 1.0, "gpu": 1.0}
    assert nodes.fitting(needs) == {"c"}
    nodes.avoid_for("c", "task/0")
    assert nodes.avoided("task/0", needs, now=0.0) == set()
    nodes.mark_lost("a", now=0.0)
    assert nodes.avoided("task/0", needs, now=0.0) == {"a"}


class Ray:
    """Takes tasks, and does with each what the next of `answers` says: an error, nothing, or a connection."""

    def __init__(self, *answers: BaseException | str | None) -> None:
        self.answers = list(answers)
        self.avoided: list[str] = []
        self.calls: list[Future[Any]] = []
        self._selector = ""

    @asynccontextmanager
    async def service(self) -> AsyncIterator[RolloutService]:
        """Where it calls; its calls end with it."""
        self._loop = asyncio.get_running_loop()
        async with RolloutService("127.0.0.1") as service:
            try:
                yield service
            finally:
                for _, writer in await asyncio.gather(*map(asyncio.wrap_future, self.calls)):
                    writer.close()

    def options(self, label_selector: dict[str, str]) -> Any:
        self._selector = label_selector[NODE_LABEL]
        return self

    def remote(self, ticket: RolloutTicket) -> Any:
        self.avoided.append(self._selector)
        self._selector = ""
        done: Future[None] = Future()
        answer = self.answers.pop(0) if self.answers else "call"
        if isinstance(answer, BaseException):
            done.set_exception(answer)
        elif answer == "call":
            calling = connect_to_driver(ticket.host, ticket.port, ticket.token, "rollout", ticket.rollout_id)
            self.calls.append(asyncio.run_coroutine_threadsafe(calling, self._loop))

        class Ref:
            def future(self) -> Future[None]:
                return done

        return Ref()


def place(ray: Ray, service: RolloutService, nodes: ClusterNodes) -> RolloutPlacement:
    return RolloutPlacement(ray, service, nodes, "r1", member="task/0", bundle=NEEDS)


def test_what_ends_before_it_began_is_submitted_again() -> None:
    async def begin() -> None:
        ray = Ray(WorkerCrashedError(), WorkerCrashedError())
        async with ray.service() as service:
            placement = place(ray, service, three_nodes())
            await placement.start()
            assert len(ray.avoided) == 3
            await placement.end()

    run(begin())


def test_what_never_begins_is_given_up() -> None:
    async def begin() -> None:
        ray = Ray(*[WorkerCrashedError()] * 9)
        async with RolloutService("127.0.0.1") as service:
            with pytest.raises(SandboxError, match="could not be placed"):
                await place(ray, service, three_nodes()).start()

    run(begin())


def test_what_the_node_cannot_run_is_not_tried_again() -> None:
    async def begin() -> None:
        words = "Traceback\nModuleNotFoundError: paddock"
        error: Any = RayTaskError("run_rollout_task", words, ModuleNotFoundError("paddock"))  # type: ignore[no-untyped-call]
        ray = Ray(error)
        async with RolloutService("127.0.0.1") as service:
            with pytest.raises(SandboxError, match="could not run it: ModuleNotFoundError: paddock"):
                await place(ray, service, three_nodes()).start()
        assert len(ray.avoided) == 1

    run(begin())


def test_those_that_wait_are_submitted_again_without_a_lost_node() -> None:
    async def begin() -> None:
        ray, nodes = Ray(None), three_nodes()
        async with ray.service() as service:
            placement = place(ray, service, nodes)
            beginning = asyncio.ensure_future(placement.start())
            await asyncio.sleep(0.05)
            nodes.mark_lost("b", now=asyncio.get_running_loop().time())
            await beginning
            await placement.end()
        assert ray.avoided == ["", "!in(b)"]

    run(begin())


def test_a_batch_without_room_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddock.scale.placement.WATCH_SECONDS", 0.01)

    async def begin() -> None:
        nodes = three_nodes()
        nodes.last_change -= 10_000
        async with RolloutService("127.0.0.1") as service:
            with pytest.raises(SandboxError, match="no node had room for 1 CPU"):
                await place(Ray(None), service, nodes).start()

    run(begin())


def test_a_loss_is_explained_by_who_still_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddock.scale.placement.REASON_SECONDS", 0.05)

    async def explain() -> None:
        nodes = three_nodes()
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        nodes.members["a"]["NodeManagerPort"] = server.sockets[0].getsockname()[1]
        ray = Ray()
        async with server, ray.service() as service:
            for name, words in (("a", "worker on node 10.0.0.1 is gone"), ("b", "its node 10.0.0.1 is gone")):
                placement = place(ray, service, nodes)
                await placement.start()
                placement.worker = {"node": name, "address": "10.0.0.1", "pid": 1}
                assert words in await placement.explain_loss("the connection ended")
                placement.finished = True
                await placement.end()
        assert nodes.avoided_by_member == {"task/0": {"a"}}
        assert set(nodes.lost_until) == {"b"}

    run(explain())


# -- the engine -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"per_node": 0}, {"per_node": 20_000}, {"address": "ray://head:10001"}])
def test_an_engine_that_cannot_be_is_refused_with_a_hint(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        RayBackend(**wrong)
    assert caught.value.hint


@pytest.mark.parametrize("most", [1, 2, 3, 7, 128])
def test_a_limit_for_each_node_is_a_share_that_fits_so_often_and_no_more(most: int) -> None:
    engine = RayBackend(resources=Resources(0.5, 1000, {"sandbox_bwrap": 1}), per_node=most)
    options = engine._options()
    (share,) = (amount for name, amount in options["resources"].items() if name != "sandbox_bwrap")
    assert share * most <= 1 < share * (most + 1)
    assert (options["num_cpus"], options["memory"], options["max_retries"]) == (0.5, 1000, 0)
    assert options["resources"]["sandbox_bwrap"] == 1
