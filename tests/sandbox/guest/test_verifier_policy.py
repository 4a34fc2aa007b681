"""Links to the tests are found, whatever way they lead there."""

from pathlib import Path

import pytest

from paddock.sandbox.guest import verifier_policy


@pytest.mark.parametrize(
    ("target", "leads"),
    [
        ("/tests/answer", True),
        ("/logs/verifier/reward.txt", True),
        ("../../tests/answer", True),
        ("../../logs", True),
        ("../..", True),
        ("/", True),
        ("/home/user/./logs", True),
        ("//tests", True),
        ("/proc/self/root/tests", True),
        ("here/../../../logs", True),
        ("../../../../../../tests", True),
        ("/tmp/expected", True),
        ("/dev/shm/expected", True),
        ("/usr/bin/python3", False),
        ("/dev/null", False),
        ("../other/tests", False),
        ("tests/answer", False),
        ("..", False),
        ("/home/user/workdir/logs", False),
        ("/tests-of-mine", False),
        ("", False),
    ],
)
def test_links_to_the_tests_are_known_by_their_text(target: str, leads: bool) -> None:
    assert verifier_policy.leads_to_the_tests("/home/user/workdir/sub", target) is leads


def test_links_are_found_in_folders_that_cannot_be_listed(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    (tmp_path / "good").symlink_to("/usr/bin/env")
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/bad").symlink_to("/tests/answer")
    (tmp_path / "a").chmod(0o311)
    assert verifier_policy.find_links_to_the_tests(str(tmp_path)) == {f"{tmp_path}/a/b/bad"}
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o311
