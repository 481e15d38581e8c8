"""Read the whole repository and say what breaks the rules that no other tool knows.

ruff bans calls (pyproject.toml, banned-api), import-linter bans imports; here
are the rules about files, sizes and words. Every finding names the place and
what to write instead. A function or file may be over its limit only with an
entry, and a reason, in scripts/style_exceptions.toml; an entry that is no
longer needed is a finding too.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
EXCEPTIONS = ROOT / "scripts" / "style_exceptions.toml"

# h11's longest function has 64 lines, nano-vllm's 55; the tail is what makes code hard to read.
FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 400
# Models, recordings and wheels do not belong in git.
BLOB_BYTES_MAX = 1_000_000

GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")
VAGUE_MODULES = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "managers"}
# A version folder of the protos is common/v1: the wire's name for shared messages.
VAGUE_ALLOWED_UNDER = ("protos/slackwater/", "sdk/slackwater/_protos/")
# Folders whose tests run on no clock but their own.
TIMELESS = ("tests/unit/", "tests/simulation/")


@dataclass(frozen=True)
class Ban:
    pattern: re.Pattern[str]
    instead: str


# The patterns are assembled so that this file does not find itself.
BANS = (
    Ban(re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"), "finish it, or file an issue and say nothing here"),
    Ban(
        re.compile(r"(?<![\w.~/-])/(?:work|root|Users|home/\w+)/"),
        "a path of one machine: take it from an argument or from Path(__file__)",
    ),
    Ban(re.compile(r"^\s*from tests[. ]|^\s*import tests\b"), "shared test code lives in <package>/testing.py"),
    Ban(re.compile(r"#\s*type:\s*ignore(?!\[)"), "type: ignore[code], so that it hides one thing only"),
    Ban(re.compile(r"#\s*noqa(?!:\s*[A-Z]+\d)"), "noqa: CODE, so that it hides one thing only"),
)


@dataclass(frozen=True, order=True)
class Finding:
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Oversize:
    """A function (`name`) or a file (no name) above its limit."""

    path: str
    name: str
    line: int
    lines: int
    limit: int


def tracked_files() -> list[str]:
    """Return what git tracks or would track, as paths from the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    return sorted(path for path in listed if path and (ROOT / path).is_file())


def banned_words(path: str, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), start=1):
        for ban in BANS:
            if match := ban.pattern.search(line):
                yield Finding(path, number, f"{match.group().strip()!r} is not written here; instead: {ban.instead}")


def vague_name(path: str) -> Iterator[Finding]:
    if path.startswith(VAGUE_ALLOWED_UNDER):
        return
    for part in PurePosixPath(path).with_suffix("").parts:
        if part in VAGUE_MODULES:
            yield Finding(path, 1, f"{part!r} says nothing; name the file after what it is about")


def silent_handlers(path: str, tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and all(isinstance(step, ast.Pass) for step in node.body):
            text = "an exception is swallowed; handle it, or use contextlib.suppress with a comment saying why"
            yield Finding(path, node.lineno, text)


def sleeping_tests(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Find sleeps in tests that must not wait; `asyncio.sleep(0)` only yields and may stay."""
    if not path.startswith(TIMELESS):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "sleep":
            continue
        yields_only = bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
        if not yields_only:
            yield Finding(path, node.lineno, "a test that sleeps hopes; move the clock, or wait for the event itself")


def stray_test_package(path: str) -> Iterator[Finding]:
    if path.startswith("tests/") and path.endswith("/__init__.py"):
        yield Finding(path, 1, "tests are no package (importlib mode); delete this file")


def oversizes(path: str, text: str, tree: ast.Module) -> Iterator[Oversize]:
    """Find what is too long in program code; tests are lists of cases and may be long."""
    if path.startswith("tests/"):
        return
    lines = len(text.splitlines())
    if lines > FILE_LINES_MAX:
        yield Oversize(path, "", 1, lines, FILE_LINES_MAX)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield Oversize(path, node.name, node.lineno, length, FUNCTION_LINES_MAX)


def check_text(path: str, text: str) -> tuple[list[Finding], list[Oversize]]:
    """Apply every rule to one file, given as text."""
    found = [*vague_name(path), *stray_test_package(path), *banned_words(path, text)]
    if not path.endswith(".py"):
        return found, []
    tree = ast.parse(text, filename=path)
    found += [*silent_handlers(path, tree), *sleeping_tests(path, tree)]
    return found, list(oversizes(path, text, tree))


def read_exceptions(text: str) -> dict[tuple[str, str], str]:
    """Return {(path, function or ""): reason}."""
    entries = tomllib.loads(text).get("long", [])
    return {(entry["path"], entry.get("function", "")): entry["reason"] for entry in entries}


def judge_sizes(found: list[Oversize], allowed: dict[tuple[str, str], str]) -> Iterator[Finding]:
    for over in found:
        if not allowed.get((over.path, over.name), "").strip():
            what = f"function {over.name}" if over.name else "file"
            yield Finding(over.path, over.line, f"{what} has {over.lines} lines, at most {over.limit}; split it")
    needed = {(over.path, over.name) for over in found}
    for path, name in allowed.keys() - needed:
        yield Finding(path, 1, f"the size exception for {name or 'the file'} is not needed any more; delete it")


def check_repository() -> list[Finding]:
    found: list[Finding] = []
    long: list[Oversize] = []
    for path in tracked_files():
        if GENERATED.search(path):
            continue
        raw = (ROOT / path).read_bytes()
        if len(raw) > BLOB_BYTES_MAX:
            found.append(Finding(path, 1, f"{len(raw)} bytes; build it or fetch it by hash instead of committing it"))
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            continue  # a picture or other binary: only its size is of interest
        findings, sizes = check_text(path, text)
        found += findings
        long += sizes
    found += judge_sizes(long, read_exceptions(EXCEPTIONS.read_text()))
    return sorted(found)


def main() -> None:
    found = check_repository()
    for finding in found:
        print(finding)
    if found:
        sys.exit(f"{len(found)} findings")


if __name__ == "__main__":
    main()
