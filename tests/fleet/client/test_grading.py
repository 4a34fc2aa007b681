"""Entry points and bundles of verifiers, and partial credit from their output."""

import base64
import io
import pickle
import zipfile

import pytest

from paddock.fleet.client.errors import VerifierInvalid
from paddock.fleet.client.grading import execute_body, find_entry_point, partial_reward

from .plane import DataOnly


@pytest.mark.parametrize(
    ("source", "named", "name"),
    [
        ("def verify(env): ...", None, "verify"),
        ("def helper(env): ...\nasync def verify(env): ...", None, "verify"),
        ("def helper(env): ...\n@verifier(key='x')\ndef check(env): ...", None, "check"),
        ("def helper(): ...\ndef validate_task(env): ...", None, "validate_task"),
        ("def only(env): ...", None, "only"),
        ("def one(env): ...\ndef two(env): ...", "one", "one"),
        ("this is (not python", "verify", "verify"),
    ],
)
def test_the_entry_point_is_found(source: str, named: str | None, name: str) -> None:
    assert find_entry_point(source, named).name == name


@pytest.mark.parametrize(
    ("source", "named", "message"),
    [
        ("def one(env): ...\ndef two(env): ...", None, "one, two"),
        ("x = 1", None, "no function"),
        ("this is (not python", None, "parsed"),
        ("def verify(env): ...", "other", "other"),
    ],
)
def test_an_entry_point_that_is_not_clear_is_refused(source: str, named: str | None, message: str) -> None:
    with pytest.raises(VerifierInvalid, match=message):
        find_entry_point(source, named)


def test_a_verifier_travels_as_plain_data_and_the_same_source_as_the_same_bundle() -> None:
    entry = find_entry_point("def verify(env, **more): ...")
    assert entry.takes("anything")
    values = {"final_answer": "é", "n": [1, {"a": None}]}
    first, second = (
        execute_body(key="k", source="def verify(env, **more): ...", entry=entry, instance_id="i", arguments=values)
        for _ in range(2)
    )
    assert first == second
    packed = DataOnly(io.BytesIO(base64.b64decode(first["args"]))).load()
    assert packed == {"args": (None, {"env": "i"}), "kwargs": values}
    assert first["args_array"] == [{"env": "i"}]
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(first["bundle"]))) as bundle:
        assert bundle.namelist() == ["requirements.txt", "verifier.py"]
    assert pickle.loads(base64.b64decode(first["args"]))


def block(kind: str, items: list[str]) -> str:
    return f">>> {kind}_ACCUMULATOR >>>\n{items!r}\n<<< {kind}_ACCUMULATOR <<<\n"


def application(name: str, passed: int, *notes: str, errors: tuple[str, ...] = ()) -> str:
    """What a verifier of several applications prints for one of them."""
    wrong = block("ERROR", list(errors)) if errors else ""
    text = f"{wrong}{block('SUCCESS', list(notes))}"
    return f"<<< VERIFY_{name} <<<\n{text}>>> VERIFY_{name} >>>\nApp {name}: {passed}\n"


FAILED = application("lifeline", 0, errors=("[X] No appointment found",))
DONE = application("outlook", 1, "[C] Email sent", "[C] Database diff validated - no unexpected changes")


@pytest.mark.parametrize(
    ("stdout", "share"),
    [
        (block("ERROR", ["a"]) + block("SUCCESS", ["b", "c", "d"]), 0.75),
        (block("ERROR", ["a"]), 0.0),
        (block("ERROR", []) + block("SUCCESS", []), None),
        ("nothing of the kind", None),
        (">>> ERROR_ACCUMULATOR >>>\n__import__('os')\n<<< ERROR_ACCUMULATOR <<<\n", None),
        ("App 1: 1 done\nApp 2: 0 missing\n", 0.5),
        ("App 1: 1 (no unexpected changes)\nApp 2: 0 missing\n", 0.0),
        ("App 1: 1 (no unexpected changes)\n", None),
        (DONE + FAILED, 0.5),
        (DONE + FAILED + application("medora", 1, "[C] Verified no unexpected changes in the Medora database"), 0.5),
        (DONE + FAILED + application("files", 1, "[C] No filesystem changes required for this task"), 0.5),
        (DONE + FAILED + application("seal", 1, "[C] No-unexpected-envelopes check passed"), 0.5),
        (DONE + FAILED + application("seal", 0, "[C] No unexpected envelopes", errors=("[X] one",)), 1 / 3),
        (application("medora", 1, "[C] No unexpected changes") + FAILED, 0.0),
        (application("medora", 1, "[C] No unexpected changes"), None),
        (
            DONE
            + FAILED
            + "<<< VERIFY_files <<<\nPASS: [C] No filesystem changes expected\n>>> VERIFY_files >>>\nApp files: 1\n",
            0.5,
        ),
        (DONE + "Error in app lifeline: boom\n" + FAILED + "Combined result: 1/2 apps passed\n", 0.5),
    ],
)
def test_partial_credit_is_read_from_what_was_printed(stdout: str, share: float | None) -> None:
    assert partial_reward(stdout) == share
