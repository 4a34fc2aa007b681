import subprocess
from pathlib import Path

from paddock.tasks.swebench.scripts import changed_files, command_script, record_exit_code
from tasks.datasets.repositories import git, make_repository

PATCH = """\
diff --git a/a_test.py b/a_test.py
--- a/a_test.py
+++ b/a_test.py
@@ -1 +1 @@
-old
+new
diff --git a/b_test.py b/b_test.py
new file mode 100644
--- /dev/null
+++ b/b_test.py
@@ -0,0 +1 @@
+added
diff --git a/data.json b/data.json
deleted file mode 100644
--- a/data.json
+++ /dev/null
@@ -1 +0,0 @@
-{}
"""


def test_a_patch_names_its_files_before_and_after() -> None:
    assert changed_files(PATCH) == (["a_test.py", "data.json"], ["a_test.py", "b_test.py"])


def run(folder: Path, command: str | list[str]) -> list[str]:
    """What the test script prints between and after its markers. The test patch is beside the repository."""
    script = command_script(command, folder=str(folder), commit="HEAD", test_patch=PATCH)
    (folder.parent / "test.patch").write_text(PATCH)
    whole = record_exit_code(script).replace("/tests/", f"{folder.parent}/").replace("--global ", "--local ")
    done = subprocess.run(["bash", "-c", whole], cwd=folder, capture_output=True, text=True, timeout=30)
    return done.stdout.splitlines()


def test_the_tests_of_the_row_replace_those_that_the_agent_changed(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    make_repository(folder, {"a_test.py": "old\n", "data.json": "{}\n"})
    (folder / "a_test.py").write_text("by the agent\n")
    (folder / "b_test.py").write_text("by the agent\n")
    lines = run(folder, "cat")
    assert lines == [
        ">>>>> Start Test Output",
        "new",
        "added",
        ">>>>> End Test Output",
        ">>>>> Test Exit Code: 0",
    ]
    assert git(folder, "status", "--short") == "M a_test.py\n D data.json\n?? b_test.py"


def test_a_list_of_commands_is_run_as_it_is_and_its_exit_code_is_printed(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    make_repository(folder, {"a_test.py": "old\n", "data.json": "{}\n"})
    assert run(folder, ["echo one", "(exit 3)"])[-3:] == ["one", ">>>>> End Test Output", ">>>>> Test Exit Code: 3"]


def test_a_test_patch_that_does_not_apply_is_logged(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    make_repository(folder, {"a_test.py": "other\n", "data.json": "{}\n"})
    assert run(folder, "true")[0] == ">>>>> Patch Apply Failed"
