"""Images without an engine: `python -m bench.images [start|build|sequence|pull] [--image debian:bookworm-slim]`.

`start` opens a sandbox on the image, runs `true` and closes it, in turns with a sandbox without an image. `build`
times an unchanged build, and one whose last step changed. `sequence` opens many sandboxes of one image, one after the
other, and compares what is there before and after. `pull` fetches the image from Debian's `docker-registry` on
loopback, in turns with `skopeo copy` and `umoci unpack`. An engine's start is measured where podman or docker exists.

The image has to be in the store: `python -m scripts.base_image`. `pull` needs the packages docker-registry, skopeo
and umoci.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tests.end_to_end.registries import copy_image, missing_programs, registry_running

from paddock.limits import SandboxLimits
from paddock.sandbox import Command, SandboxSpec, open_sandbox
from paddock.sandbox.images.build import build_image
from paddock.sandbox.images.exporting import export_image
from paddock.sandbox.images.registry.pull import pull_image
from paddock.sandbox.images.resolve import get_image
from paddock.sandbox.images.store import ImageStore, default_store
from paddock.sandbox.network.policy import NO_NETWORK

if TYPE_CHECKING:
    from paddock.sandbox.images.image import Image

MEASURES = ("start", "build", "sequence", "pull")
WARM_UPS = 3
TIMEOUT_SECONDS = 600.0
STEPS = "FROM {image}\nWORKDIR /app\nRUN echo 1 > one\nCOPY a.txt b.txt ./\nRUN echo {last} > last\n"
FILES = {"a.txt": b"A", "b.txt": b"B"}


async def open_and_close(image: Image | None) -> float:
    """Seconds to open a sandbox, run `true` in it, and close it."""
    started = time.perf_counter()
    async with await open_sandbox("bwrap", SandboxSpec(SandboxLimits(), image=image)) as sandbox:
        completed = await sandbox.exec(Command(["/bin/true"]), timeout=TIMEOUT_SECONDS)
    assert completed.exit_code == 0, completed
    return time.perf_counter() - started


def show(label: str, seconds: list[float]) -> None:
    milliseconds = [1000 * one for one in seconds]
    print(f"{label}: median {median(milliseconds):.1f} ms, minimum {min(milliseconds):.1f} ms, {len(seconds)} times")


async def measure_start(image: Image, rounds: int) -> None:
    with_image, without = [], []
    for number in range(rounds + WARM_UPS):
        pair = await open_and_close(image), await open_and_close(None)
        if number >= WARM_UPS:
            with_image.append(pair[0])
            without.append(pair[1])
    show("sandbox on the image", with_image)
    show("sandbox without one", without)
    of_minima = min(with_image) / min(without)
    print(f"ratio: {median(with_image) / median(without):.2f} of medians, {of_minima:.2f} of minima; target 1.5")
    engine = find_engine()
    if engine is None:
        print("no container runtime runs here: no comparison with one")
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "image.tar")
        await export_image(image, archive)
        await asyncio.to_thread(call, engine, "load", "--input", str(archive))
    seconds = [await asyncio.to_thread(call, engine, "run", "--rm", image.name, "/bin/true") for _ in range(rounds)]
    show(f"{Path(engine).name} run", seconds)
    print(f"ratio: {median(seconds) / median(with_image):.1f}; target 5")


def find_engine() -> str | None:
    for name in ("podman", "docker"):
        engine = shutil.which(name)
        if engine and subprocess.run([engine, "info"], capture_output=True, check=False, timeout=30).returncode == 0:
            return engine
    return None


def call(*command: str) -> float:
    """Seconds that a program takes."""
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_SECONDS)
    return time.perf_counter() - started


async def measure_build(image: Image, rounds: int) -> None:
    unchanged: list[float] = []
    changed: list[float] = []
    nonce = time.time_ns()
    for number in range(rounds + 1):
        dockerfile = STEPS.format(image=image.name, last=f"{nonce}-{number}")
        results: list[list[str]] = []
        for _ in range(2):
            kinds: list[str] = []
            results.append(kinds)
            started = time.perf_counter()
            await build_image(
                dockerfile,
                FILES,
                name="paddock-bench:build",
                network=NO_NETWORK,
                timeout=TIMEOUT_SECONDS,
                on_progress=lambda event, kinds=kinds: kinds.append(event.kind),  # type: ignore[misc]
            )
            (changed if len(results) == 1 else unchanged).append(time.perf_counter() - started)
        steps = [[kind for kind in kinds if kind in ("cached", "done")] for kinds in results]
        assert steps[1] == ["cached"] * 4, steps
        assert number == 0 or steps[0] == ["cached"] * 3 + ["done"], steps
    default_store().remove("paddock-bench:build")
    show("unchanged build", unchanged[1:])
    show("last step changed, only that step is run", changed[1:])
    print("target: unchanged under 50 ms")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What this process and its store hold."""

    resident_kib: int
    mounts: int
    children: int
    descriptors: int
    folders: int
    """Of all sandboxes of this machine."""
    store_files: int
    store_kib: int

    @classmethod
    def measure(cls) -> Footprint:
        status = Path("/proc/self/status").read_text().splitlines()
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        store = default_store().folder
        return cls(
            resident,
            len(Path("/proc/self/mounts").read_text().splitlines()),
            len(children),
            len(os.listdir("/proc/self/fd")),
            len(list(Path(tempfile.gettempdir()).glob("paddock-sb-*"))),
            sum(1 for _ in (store / "images").iterdir()) + sum(1 for _ in store.glob("*/tmp/*")),
            int(subprocess.run(["du", "-sk", store], capture_output=True, text=True, check=False).stdout.split()[0]),
        )


async def measure_sequence(image: Image, count: int) -> None:
    for _ in range(WARM_UPS):
        await open_and_close(image)
    before = Footprint.measure()
    started = time.perf_counter()
    for number in range(count):
        await open_and_close(image)
        if (number + 1) % max(count // 5, 1) == 0:
            print(f"{number + 1}: {Footprint.measure()}")
    print(f"{count} sandboxes in {time.perf_counter() - started:.1f} s")
    print(f"before: {before}\nafter:  {Footprint.measure()}")


async def measure_pull(image: Image, rounds: int) -> None:
    if missing_programs() or shutil.which("umoci") is None:
        raise SystemExit(missing_programs() or "umoci missing: apt-get install umoci")
    with tempfile.TemporaryDirectory(prefix="paddock-bench-") as name:
        folder = Path(name)
        # Root of a user namespace has to enter it.
        os.chmod(folder, 0o755)
        await export_image(image, folder / "image.tar")
        with registry_running(folder / "registry") as host:
            await asyncio.to_thread(copy_image, f"docker-archive:{folder}/image.tar", f"docker://{host}/bench:1")
            ours, theirs = [], []
            for number in range(rounds):
                started = time.perf_counter()
                await pull_image(f"{host}/bench:1", ImageStore(folder / f"store-{number}"))
                ours.append(time.perf_counter() - started)
                theirs.append(await asyncio.to_thread(copy_and_unpack, f"docker://{host}/bench:1", folder, number))
    show("paddock image pull", ours)
    show("skopeo copy and umoci unpack", theirs)
    print(f"ratio: {median(ours) / median(theirs):.2f}; target 1")


def copy_and_unpack(source: str, folder: Path, number: int) -> float:
    started = time.perf_counter()
    copy_image(source, f"oci:{folder}/layout-{number}:1")
    call("umoci", "unpack", "--image", f"{folder}/layout-{number}:1", f"{folder}/bundle-{number}")
    return time.perf_counter() - started


async def run(options: argparse.Namespace) -> None:
    image = await get_image(options.image, pull=False)
    for name in options.measures or MEASURES:
        print(f"-- {name}", flush=True)
        match name:
            case "start":
                await measure_start(image, options.rounds)
            case "build":
                await measure_build(image, options.rounds)
            case "sequence":
                await measure_sequence(image, options.count)
            case "pull":
                await measure_pull(image, max(2, options.rounds // 10))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.images", description=__doc__)
    parser.add_argument("measures", nargs="*", choices=[[], *MEASURES], metavar="MEASURE", help=", ".join(MEASURES))
    parser.add_argument("--image", default="debian:bookworm-slim")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--count", type=int, default=1000, help="sandboxes of `sequence`")
    asyncio.run(run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
