"""The three modules must say what they said before; how they are built is read from their source, not run."""

import ast
import json
import os
import random
import stat
import subprocess
from pathlib import Path

CALL = (Path(__file__).resolve().parent / "call.py").read_text()
MOST_BYTES = 4_000_000

MODULES = ("invoice", "receipt", "quote")
IMPORTED = (".py", ".pyc", ".so")
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)


def apart(*words, stdin=b"", seconds=5.0):
    """Exit status (None if it took too long), output and errors of a command that can reach nothing of the tests."""
    words = ["paddock-run", "--max-output", "1000000", *words]
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, b"", b""
    return done.returncode, done.stdout, done.stderr


def read(path):
    """The bytes of a plain file of reasonable size; None for anything else, such as a link or a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            return None
        return os.read(descriptor, MOST_BYTES)
    finally:
        os.close(descriptor)


def money(cents):
    return f"{cents // 100}.{cents % 100:02d}"


def totals(lines, discount_percent, tax_percent):
    amounts = [quantity * price for _, quantity, price in lines]
    subtotal = sum(amounts)
    discount = (subtotal * discount_percent + 50) // 100
    tax = ((subtotal - discount) * tax_percent + 50) // 100
    return {
        "amounts": amounts,
        "subtotal": subtotal,
        "discount": discount,
        "tax": tax,
        "total": subtotal - discount + tax,
    }


def invoice(customer, lines, discount_percent, tax_percent):
    sums = totals(lines, discount_percent, tax_percent)
    rows = [f"{line[1]} x {line[0]}: {money(amount)}" for line, amount in zip(lines, sums["amounts"], strict=True)]
    ends = [("subtotal", "subtotal"), ("discount", "discount"), ("tax", "tax"), ("to pay", "total")]
    return "\n".join([f"INVOICE for {customer}", *rows, *(f"{word} {money(sums[key])}" for word, key in ends)])


def receipt(lines, tax_percent, paid):
    sums = totals(lines, 0, tax_percent)
    rows = [f"{line[0]} {money(amount)}" for line, amount in zip(lines, sums["amounts"], strict=True)]
    end = "paid in full" if paid >= sums["total"] else f"paid {money(paid)}"
    return "\n".join(["RECEIPT", *rows, f"of which tax {money(sums['tax'])}", f"total {money(sums['total'])}", end])


def quote(customer, lines, discount_percent):
    sums = totals(lines, discount_percent, 0)
    rows = [f"- {line[0]} ({line[1]}): {money(amount)}" for line, amount in zip(lines, sums["amounts"], strict=True)]
    rows += [f"you save {money(sums['discount'])}"] if sums["discount"] else []
    return "\n".join([f"QUOTE for {customer}: {money(sums['total'])} before tax", *rows])


def cases():
    source = random.Random(4711)
    documents, shared = [], []
    for count in [0, 1, *(source.randint(1, 6) for _ in range(25))]:
        lines = [[f"item{n}", source.randint(1, 9), source.randint(1, 9999)] for n in range(count)]
        discount, tax, paid = source.randint(0, 40), source.choice([0, 7, 19]), source.randint(0, 90000)
        documents += [
            (["invoice", "render", ["Ada", lines, discount, tax]], invoice("Ada", lines, discount, tax)),
            (["receipt", "render", [lines, tax, paid]], receipt(lines, tax, paid)),
            (["quote", "render", ["Bob", lines, discount]], quote("Bob", lines, discount)),
        ]
        shared += [
            (["totals", "compute_totals", [lines, discount, tax]], totals(lines, discount, tax)),
            (["totals", "compute_totals", [lines]], totals(lines, 0, 0)),
            (["totals", "format_money", [paid]], money(paid)),
        ]
    return documents, shared


def all_right(wanted):
    questions = json.dumps([call for call, _ in wanted]).encode()
    status, output, _ = apart("python3", "-I", "-B", "-c", CALL, stdin=questions)
    try:
        return status == 0 and json.loads(output) == [{"result": expected} for _, expected in wanted]
    except (ValueError, RecursionError):
        return False


def parsed(path):
    try:
        return ast.parse(read(path) or b"")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def called(tree):
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {getattr(function, "id", getattr(function, "attr", None)) for function in functions}


def has_arithmetic(tree):
    return bool(called(tree) & {"sum", "round"}) or any(
        isinstance(node, ast.AugAssign) or (isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS))
        for node in ast.walk(tree)
    )


def is_pulled_together(module):
    tree = parsed(f"{module}.py")
    return tree is not None and {"compute_totals", "format_money"} <= called(tree) and not has_arithmetic(tree)


def other_modules():
    """All that could be imported in place of, or beside, the modules that are read here."""
    sources = [path for path in Path().rglob("*") if path.suffix in IMPORTED and "__pycache__" not in path.parts]
    expected = {*(f"{module}.py" for module in MODULES), "totals.py"}
    return [path for path in sources if str(path) not in expected and not path.name.startswith("test")]


# Without it nothing can be said about the program: then there is no reward.
subprocess.run(["paddock-run", "true"], check=True)
# Read before anything runs: a module could replace its own source.
pulled_together = {module: float(is_pulled_together(module)) for module in MODULES}
others = other_modules()
documents, shared = cases()
unchanged = all_right(documents)
parts = {"unchanged": float(unchanged), "totals": float(all_right(shared) and not others), **pulled_together}
built = [parts[name] for name in ("totals", *MODULES)]
reward = sum(built) / len(built) if unchanged else 0.0
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, "parts": parts}))
print("reward", reward, parts)
