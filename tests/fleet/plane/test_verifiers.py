"""Verifier calls: the bundle is checked, the code runs once per request, the answer is kept."""

import asyncio
import base64
import hashlib
import io
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paddock.errors import VerifierError
from paddock.fleet.instance.verifier.runner import VerifierRequest
from running import wait_until

from .running_plane import RunningPlane, StartPlane

EXECUTE = "/v1/verifiers/execute"
CODE = "def verify(env):\n    return 1.0\n"
FIELDS = {
    *("success", "result", "error", "stdout", "execution_id", "execution_time_ms", "bundle_cache_hit"),
    *("key", "version", "verifier_id", "created_at", "comment", "display_src"),
}


class Verifier:
    """Answers 0.5 and remembers what it was asked. With `hold` it waits for `release`."""

    def __init__(self) -> None:
        self.calls: list[VerifierRequest] = []
        self.errors: list[Exception] = []
        self.hold = False
        self.release = threading.Event()

    async def __call__(self, call: VerifierRequest) -> dict[str, Any]:
        self.calls.append(call)
        if self.errors:
            raise self.errors.pop()
        while self.hold and not self.release.is_set():
            await asyncio.sleep(0.005)
        return {"success": True, "result": 0.5, "error": None, "stdout": "hi", "execution_time_ms": 7}


@pytest.fixture
def verifier() -> Verifier:
    return Verifier()


@pytest.fixture
def plane(start_plane: StartPlane, verifier: Verifier) -> RunningPlane:
    return start_plane(verify=verifier)


def zipped(files: dict[str, str | bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, content in files.items():
            bundle.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def with_bundle(data: bytes, **fields: Any) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    return {"key": "v", "sha256": digest, "bundle": base64.b64encode(data).decode(), **fields}


BUNDLE = zipped({"requirements.txt": "fleet-python", "verifier.py": CODE})


def test_a_verifier_is_run_on_its_instance(plane: RunningPlane, verifier: Verifier) -> None:
    made = plane.make()["instance_id"]
    named = {"args": "blob", "args_array": [1, {"env": made}], "function_name": "check", "timeout": 9}
    answer = plane.post(EXECUTE, with_bundle(BUNDLE, **named))
    assert set(answer) >= FIELDS
    assert (answer["success"], answer["result"], answer["stdout"]) == (True, 0.5, "hi")
    assert (answer["key"], answer["version"], answer["bundle_cache_hit"]) == ("v", 1, False)
    call = verifier.calls[0]
    assert (call.code, call.function_name, call.timeout) == (CODE, "check", 9.0)
    assert (call.args, call.args_array, call.env_key) == ("blob", [1, {"env": made}], "serve")
    assert call.folder == plane.plane.instances.folder_of(made)


def test_a_bundle_is_known_after_it_was_sent_once(plane: RunningPlane) -> None:
    order = with_bundle(BUNDLE)
    digest = order["sha256"]
    bare = {"key": "v", "sha256": digest}
    assert plane.get(f"/v1/verifiers/check?sha256={digest}")["success"] is False
    assert plane.refusal("POST", EXECUTE, bare, X_Request_ID="one") == (404, f"bundle not found: {digest}")
    assert plane.post(EXECUTE, order)["bundle_cache_hit"] is False
    checked = plane.get(f"/v1/verifiers/check?sha256={digest}")
    assert (checked["success"], checked["key"], checked["version"], checked["display_src"]) == (True, "v", 1, CODE)
    assert plane.post(EXECUTE, bare, X_Request_ID="one")["bundle_cache_hit"] is True


def test_a_request_that_comes_again_gets_the_first_answer(plane: RunningPlane, verifier: Verifier) -> None:
    first = plane.post(EXECUTE, with_bundle(BUNDLE), X_Request_ID="one")
    assert plane.post(EXECUTE, with_bundle(BUNDLE), X_Request_ID="one") == first
    assert plane.post(EXECUTE, with_bundle(BUNDLE), X_Request_ID="two")["execution_id"] != first["execution_id"]
    assert len(verifier.calls) == 2


def test_a_request_that_comes_again_waits_for_the_first(plane: RunningPlane, verifier: Verifier) -> None:
    verifier.hold = True
    with ThreadPoolExecutor(3) as threads:
        answers = [
            threads.submit(plane.post, EXECUTE, with_bundle(BUNDLE), X_Request_ID="one", X_Number=str(number))
            for number in range(3)
        ]
        wait_until(lambda: verifier.calls)
        verifier.release.set()
        assert len({answer.result()["execution_id"] for answer in answers}) == 1
    assert len(verifier.calls) == 1


def test_the_answer_is_known_to_the_next_plane(start_plane: StartPlane, verifier: Verifier) -> None:
    first = start_plane(verify=verifier)
    answer = first.post(EXECUTE, with_bundle(BUNDLE), X_Request_ID="one")
    first.stop()
    assert start_plane(verify=verifier).post(EXECUTE, with_bundle(BUNDLE), X_Request_ID="one") == answer
    assert len(verifier.calls) == 1


def test_a_run_that_outlived_its_plane_gives_no_grade(start_plane: StartPlane, verifier: Verifier) -> None:
    first = start_plane(verify=verifier)
    verifier.hold = True
    with ThreadPoolExecutor(1) as threads:
        threads.submit(first, "POST", EXECUTE, with_bundle(BUNDLE), X_Request_ID="one")
        wait_until(lambda: verifier.calls)
        first.stop()
    answer = start_plane(verify=verifier).post(EXECUTE, with_bundle(BUNDLE), X_Request_ID="one")
    assert (answer["success"], answer["result"], answer["error"]["type"]) == (False, None, "PlaneRestarted")


def test_an_id_is_not_for_two_calls(plane: RunningPlane) -> None:
    plane.post(EXECUTE, with_bundle(BUNDLE), X_Request_ID="one")
    status, detail = plane.refusal("POST", EXECUTE, with_bundle(BUNDLE, timeout=5), X_Request_ID="one")
    assert (status, "X-Request-ID" in detail) == (400, True)


def test_an_instance_that_does_not_run_gives_no_grade(plane: RunningPlane, verifier: Verifier) -> None:
    made = plane.make()["instance_id"]
    plane("DELETE", f"/v1/env/instances/{made}")
    for named in (made, "unknown"):
        answer = plane.post(EXECUTE, with_bundle(BUNDLE, args_array=[{"env": named}]))
        assert (answer["success"], answer["result"]) == (False, None)
        assert answer["error"]["type"] == "InstanceNotRunning"
        assert set(answer) >= FIELDS
    assert verifier.calls == []


def test_a_run_that_failed_to_start_can_be_repeated(plane: RunningPlane, verifier: Verifier) -> None:
    verifier.errors.append(VerifierError("no memory"))
    answer = plane("POST", EXECUTE, with_bundle(BUNDLE), X_Request_ID="one")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert plane.post(EXECUTE, with_bundle(BUNDLE), X_Request_ID="one")["success"]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({}, "'sha256' and 'bundle'"),
        (with_bundle(BUNDLE, timeout=0), "'timeout' is 0"),
        (with_bundle(BUNDLE, timeout=301), "'timeout' is 301"),
        (with_bundle(BUNDLE, function_name="os.system('x')"), "'function_name'"),
        (with_bundle(BUNDLE, args=7), "'args'"),
        (with_bundle(BUNDLE, args_array={}), "'args_array'"),
        ({**with_bundle(BUNDLE), "sha256": "0" * 64}, "'sha256'"),
        ({**with_bundle(BUNDLE), "bundle": "%%%"}, "not base64"),
        (with_bundle(b"PK\x03\x04 no zip"), "not a readable zip"),
        (with_bundle(BUNDLE[: len(BUNDLE) // 2]), "not a readable zip"),
        (with_bundle(zipped({"other.py": CODE})), "no verifier.py"),
        (with_bundle(zipped({"../verifier.py": CODE})), "no verifier.py"),
        (with_bundle(zipped({"verifier.py": b"\xff\xfe"})), "UTF-8"),
        (with_bundle(zipped({"verifier.py": b"\0" * 50_000_000})), "larger than"),
        (with_bundle(zipped({f"{number}.py": "" for number in range(300)})), "more than 256 files"),
        ({"sha256": "0" * 64, "bundle": "A" * 7_000_000}, "larger than"),
    ],
)
def test_an_invalid_call_is_refused_with_a_400(plane: RunningPlane, order: Any, words: str) -> None:
    status, detail = plane.refusal("POST", EXECUTE, order)
    assert (status, type(detail)) == (400, str)
    assert words in detail


def test_a_zip_with_a_false_size_is_limited(plane: RunningPlane) -> None:
    data = bytearray(zipped({"verifier.py": b"#" * 5_000_000}))
    claimed = (100).to_bytes(4, "little")
    data[22:26] = claimed
    central = data.index(b"PK\x01\x02")
    data[central + 24 : central + 28] = claimed
    status, detail = plane.refusal("POST", EXECUTE, with_bundle(bytes(data)))
    assert (status, "zip" in detail or "larger" in detail) == (400, True)


def test_an_encrypted_zip_is_refused(plane: RunningPlane) -> None:
    data = bytearray(BUNDLE)
    central = data.index(b"verifier.py", data.index(b"PK\x01\x02")) - 46
    data[central + 8] |= 1
    assert plane.refusal("POST", EXECUTE, with_bundle(bytes(data)))[0] == 400


def test_the_judge_says_that_there_is_none(plane: RunningPlane) -> None:
    status, detail = plane.refusal("POST", "/v1/judge/grade", {"instance_id": "x"})
    assert (status, "not configured" in detail) == (400, True)


def test_a_check_needs_a_digest(plane: RunningPlane) -> None:
    assert plane.refusal("GET", "/v1/verifiers/check")[0] == 400
