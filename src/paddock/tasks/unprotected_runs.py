"""Finds where a task's tests run a program of the agent without `paddock-run`. Reads the tests, runs nothing.

It looks for what most tests do: shell lines and calls of `subprocess` that start something from the work folder, and
imports of modules that the agent writes. `python3 -m` and `python3 -c` look for modules in the work folder first, so
an agent's `json.py` or `pytest.py` would be run. It does not follow variables, so it can overlook a run; what it
reports is almost always one.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paddock.tasks.task import Task

SAFE = "paddock-run"
INTERPRETERS = re.compile(r"(python[\d.]*|pypy3?|node|ruby|perl|php|bash|sh|dash|zsh|deno|bun|lua|Rscript|java|tsx)")
PYTHON = re.compile(r"(python[\d.]*|pypy3?)")
RUNS_WORKDIR_FILES = re.compile(r"(make|p?npm|npx|yarn|cargo|go|mvn|gradle|tox|nox|ctest|rake|bundle|dotnet|swift)")
"""They run what files of the work folder tell them to."""
WRAPPERS = re.compile(r"exec|time|nice|env|command|nohup|setsid|stdbuf|timeout|sudo|xargs|!|then|do|else|if|while")
WRAPPER_OPTION = re.compile(r"-|[\d.]+[smh]?$")
CALLS = frozenset(["run", "Popen", "call", "check_call", "check_output", "system", "popen"])
WORK = ("/home/user", "$PWD", "$(pwd)")
"""Not the home of the tests, which is another folder."""
IMPORTS_BY_NAME = frozenset(["import_module", "__import__", "run_module", "run_path", "spec_from_file_location"])
LOADED_AT_START = frozenset([*sys.builtin_module_names, "os", "io", "abc", "stat", "codecs", "site", "__future__"])
"""What an interpreter has imported before it looks into the work folder."""
IMPORTS_FROM_WORKDIR = "(it imports from the work folder first: add -I)"
CODE_LAST = re.compile(r"-[a-zA-Z]+[cm]")
"""Options in one word, such as `-Ic` or `-lc`."""
IGNORES_WORKDIR = re.compile(r"-[a-zA-Z]*[IP][a-zA-Z]*")
UNKNOWN = "$unknown"
OPERATORS = ";|&()<>"
SUBSTITUTION = re.compile(r"\$\((.+)\)|`(.+)`")
HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")


@dataclass(frozen=True, slots=True)
class UnprotectedRun:
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"tests/{self.path}:{self.line}: {self.text}"


def find_unprotected_runs(task: Task) -> list[UnprotectedRun]:
    """In the order of the files and their lines; each line once."""
    modules = agent_modules(task)
    by_line: dict[tuple[str, int], UnprotectedRun] = {}
    for path, data in sorted(task.tests.items()):
        text = data.decode("utf-8", "replace")
        if path.endswith(".py"):
            runs = find_in_python(text, modules)
        elif path.endswith((".sh", ".bash")) or text.startswith("#!"):
            runs = find_in_shell(text, modules)
        else:
            continue
        for line, words in runs:
            by_line.setdefault((path, line), UnprotectedRun(path, line, words))
    return list(by_line.values())


def agent_modules(task: Task) -> frozenset[str]:
    """Names of Python modules that are staged, or that the instruction or the solution has the agent write."""
    texts = [task.instruction, *(data.decode("utf-8", "replace") for data in task.solution.values())]
    named = {name for text in texts for name in re.findall(r"\b([A-Za-z_]\w*)\.py\b", text)}
    for path in map(PurePosixPath, task.files):
        if path.suffix == ".py":
            named |= {path.stem, path.parts[0]}
    own = {PurePosixPath(path).stem for path in task.tests}
    return frozenset(named - own - sys.stdlib_module_names)


# -- shell ------------------------------------------------------------------------------------------------


def find_in_shell(text: str, modules: frozenset[str]) -> Iterator[tuple[int, str]]:
    elsewhere = False
    for number, line, input_text in shell_lines(text):
        for words in simple_commands(line):
            if words[:1] == ["cd"] and len(words) > 1:
                elsewhere = words[1].startswith(("/tests", "/tmp", "$TMP")) or "dirname" in line
            elif elsewhere:
                continue
            elif runs_agent_code(words, modules) or (
                reads_program(words) and any(find_in_python(input_text, modules))
            ):
                yield number, line.strip()
            elif "PYTHONSAFEPATH" not in text and imports_from_workdir(words, input_text):
                yield number, f"{line.strip()} {IMPORTS_FROM_WORKDIR}"


def shell_lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Each line with its number and the text that is its input (a here-document). Continued lines are one."""
    lines = iter(enumerate(text.split("\n"), start=1))
    for number, line in lines:
        while line.endswith("\\"):
            line = line[:-1] + next(lines, (0, ""))[1]
        heredoc = HEREDOC.search(line)
        body: list[str] = []
        while heredoc:
            _, inner = next(lines, (0, heredoc[1]))
            if inner.strip() == heredoc[1]:
                break
            body.append(inner)
        yield number, line, "\n".join(body)


def simple_commands(line: str) -> list[list[str]]:
    """The commands of a line, also those in `$(...)`, each as its words. Quotes are gone."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:
        tokens = line.split()
    commands: list[list[str]] = [[]]
    for token in tokens:
        if token and set(token) <= set(";|&()"):
            commands.append([])
            continue
        commands[-1].append(token)
        for inner in SUBSTITUTION.findall(token):
            commands = [*simple_commands(inner[0] or inner[1]), *commands]
    return [words for words in commands if words]


def runs_agent_code(words: list[str], modules: frozenset[str]) -> bool:
    """Whether a simple command starts something that the agent wrote, in the process tree of the tests."""
    words = without_wrappers(words)
    if not words or words[0] == SAFE or words[-1] in ("--version", "-v", "-V"):
        return False
    name, rest = words[0], words[1:]
    if name in (".", "source"):
        return bool(rest) and is_agent_path(rest[0])
    if name.startswith(("./", "../")) or (name.startswith(WORK) and "/" in name):
        return True
    program = name.rpartition("/")[2]
    if program == "git":
        return rest[:1] not in (["--version"], ["clone"]) and rest[:2] != ["config", "--global"]
    if RUNS_WORKDIR_FILES.fullmatch(program):
        return rest[:1] not in (["version"], ["--version"], ["env"])
    if program in ("pytest", "py.test"):
        return runs_workdir_tests(rest)
    return bool(INTERPRETERS.fullmatch(program)) and interprets_agent_code(program, rest, modules)


def python_options(words: list[str]) -> list[str] | None:
    """What follows `python3`; None for another program, or if it leaves the work folder out."""
    words = without_wrappers(words)
    if not words or not PYTHON.fullmatch(words[0].rpartition("/")[2]):
        return None
    options = words[1:]
    while options and options[0].startswith("-") and options[0] not in ("-c", "-m", "-"):
        if IGNORES_WORKDIR.fullmatch(options[0]):
            return None
        options = options[1:]
    return options


def reads_program(words: list[str]) -> bool:
    """Whether it is a Python that runs what its input says."""
    words = without_wrappers(words)
    if not words or not PYTHON.fullmatch(words[0].rpartition("/")[2]):
        return False
    return next((word for word in words[1:] if not word.startswith("-") or word == "-"), "-") in (
        "-",
        "<<",
        "<<-",
        "<<<",
    )


def imports_from_workdir(words: list[str], input_text: str) -> bool:
    """Whether a Python that runs code of the tests looks for its modules in the work folder."""
    options = python_options(words)
    if options is None:
        return False
    if options[:1] == ["-m"]:
        return len(options) > 1
    code = options[1] if options[:1] == ["-c"] and len(options) > 1 else input_text if reads_program(words) else ""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return False
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return any(name not in LOADED_AT_START for node in imports for name in imported_modules(node))


def without_wrappers(words: list[str]) -> list[str]:
    while words:
        first = words[0]
        if WRAPPERS.fullmatch(first) or re.match(r"[A-Za-z_]\w*=", first):
            words = words[1:]
            while WRAPPERS.fullmatch(first) and words and WRAPPER_OPTION.match(words[0]):
                words = words[1:]
            continue
        return words
    return []


def interprets_agent_code(program: str, rest: list[str], modules: frozenset[str]) -> bool:
    for position, word in enumerate(rest):
        if CODE_LAST.fullmatch(word):
            word = f"-{word[-1]}"
        if word == "-n" and not PYTHON.fullmatch(program):
            return False
        if word == "-c":
            code = rest[position + 1] if position + 1 < len(rest) else ""
            if PYTHON.fullmatch(program):
                return any(True for _ in find_in_python(code, modules))
            return any(True for _ in find_in_shell(code, modules))
        if word == "-m":
            module, *more = [*rest[position + 1 :], ""]
            return runs_workdir_tests(more) if module in ("pytest", "unittest") else module in modules
        if word in ("<", "<<<", "-", "-s") or word.startswith(("<", ">")):
            return False
        if not word.startswith("-"):
            return is_agent_path(word)
    return False


def runs_workdir_tests(rest: list[str]) -> bool:
    paths = [word for word in rest if word and not word.startswith("-") and ("/" in word or word.endswith(".py"))]
    return not any(word.startswith(("/tests", "$")) for word in paths)


def is_agent_path(path: str) -> bool:
    """A path in the work folder: a relative one, or one below the home. What a variable holds is not known."""
    if path.startswith(WORK):
        return "/logs" not in path
    return not path.startswith(("/", "$", "-")) and "dirname" not in path


# -- Python -----------------------------------------------------------------------------------------------


def find_in_python(source: str, modules: frozenset[str]) -> Iterator[tuple[int, str]]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in imported_modules(node):
                if name in modules:
                    yield node.lineno, f"import {name} (into the process of the tests)"
        elif isinstance(node, ast.Call) and called_name(node) in CALLS and node.args:
            words = command_words(node.args[0])
            text = " ".join(word.replace(UNKNOWN, "…") for word in words)[:100]
            if words and runs_agent_code(words, modules):
                yield node.lineno, text
            elif words and imports_from_workdir(words, ""):
                yield node.lineno, f"{text} {IMPORTS_FROM_WORKDIR}"
        elif isinstance(node, ast.Call) and imported_by_name(node) & modules:
            yield node.lineno, f"{ast.unparse(node)[:100]} (into the process of the tests)"


def imported_modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    return [(node.module or "").partition(".")[0]] if not node.level else []


def imported_by_name(node: ast.Call) -> set[str]:
    """Names of modules in a call such as `importlib.import_module("prog")` or `runpy.run_path("prog.py")`."""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in IMPORTS_BY_NAME:
        return set()
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return {PurePosixPath(text).name.partition(".")[0] for text in texts}


def called_name(node: ast.Call) -> str:
    """`run` of subprocess.run(...); nothing for a method of something that is not a module of the library."""
    function = node.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.attr if function.value.id in ("subprocess", "os", "sp") else ""
    return function.id if isinstance(function, ast.Name) and function.id in ("Popen", "check_output") else ""


def command_words(node: ast.expr) -> list[str]:
    """The words of a command as far as the text shows them."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return next(iter(simple_commands(node.value)), [])
    if not isinstance(node, ast.List | ast.Tuple):
        return []
    return [literal_word(item) for item in node.elts]


def literal_word(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Attribute) and node.attr == "executable":
        return "python3"
    return UNKNOWN
