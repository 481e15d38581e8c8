"""The house rules hold in the whole repository, and each rule is seen to find what it is for."""

import subprocess
import sys
from pathlib import Path

import check_style
import pytest

ROOT = Path(__file__).resolve().parents[2]
RUFF = Path(sys.executable).parent / "ruff"


def findings(path: str, text: str) -> list[str]:
    found, _ = check_style.check_text(path, text)
    return [finding.text for finding in found]


def test_the_repository_is_clean() -> None:
    assert [str(finding) for finding in check_style.check_repository()] == []


# The faults are put together from halves, so that this file is not itself a finding.
@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("agent/x.py", "# TO" + "DO: later\n", "finish it"),
        ("docs/x.md", "FIX" + "ME\n", "finish it"),
        ("agent/x.py", 'PATH = "/ro' + 'ot/models"\n', "a path of one machine"),
        ("scripts/x.py", "open('/ho" + "me/anna/x')\n", "a path of one machine"),
        ("tests/unit/test_x.py", "from tests" + ".fakes import Fake\n", "testing.py"),
        ("agent/x.py", "y = f()  # type: " + "ignore\n", "hides one thing only"),
        ("agent/x.py", "y = f()  # no" + "qa\n", "hides one thing only"),
        ("agent/utils.py", "", "says nothing"),
        ("coordinator/common/rows.py", "", "says nothing"),
        ("agent/x.py", "try:\n    f()\nexcept ValueError:\n    pass\n", "swallowed"),
        ("tests/unit/test_x.py", "import time\ntime.sleep(0.1)\n", "hopes"),
        ("tests/simulation/test_x.py", "async def f():\n    await asyncio.sleep(1)\n", "hopes"),
        ("tests/unit/__init__.py", "", "delete this file"),
    ],
)
def test_a_planted_fault_is_found_and_the_replacement_named(path: str, text: str, expected: str) -> None:
    found = findings(path, text)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("tests/faults/test_x.py", "import time\ntime.sleep(0.1)\n"),  # real processes take real time
        ("tests/unit/test_x.py", "async def f():\n    await asyncio.sleep(0)\n"),  # only yields
        ("agent/x.py", "y = f()  # type: ignore[misc]\n"),
        ("agent/x.py", 'UNIT = "~/models/x"\nURL = "https://example.org/home/you/"\n'),
        ("protos/slackwater/common/v1/task.proto", ""),
    ],
)
def test_what_is_allowed_is_no_finding(path: str, text: str) -> None:
    assert findings(path, text) == []


def long_function(lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (lines - 1)


def test_a_function_over_the_limit_needs_an_entry_with_a_reason() -> None:
    limit = check_style.FUNCTION_LINES_MAX
    _, within = check_style.check_text("agent/x.py", long_function(limit))
    _, over = check_style.check_text("agent/x.py", long_function(limit + 1))
    assert within == []
    assert [finding.text for finding in check_style.judge_sizes(over, {})] == [
        f"function f has {limit + 1} lines, at most {limit}; split it"
    ]
    assert list(check_style.judge_sizes(over, {("agent/x.py", "f"): "one exhaustive match"})) == []
    assert len(list(check_style.judge_sizes(over, {("agent/x.py", "f"): "  "}))) == 1


def test_an_exception_that_is_not_needed_any_more_is_a_finding() -> None:
    [finding] = check_style.judge_sizes([], {("agent/x.py", "f"): "was long once"})
    assert "not needed any more" in finding.text


def test_a_file_over_the_limit_is_found_but_tests_may_be_long() -> None:
    text = "x = 1\n" * (check_style.FILE_LINES_MAX + 1)
    assert len(check_style.check_text("agent/x.py", text)[1]) == 1
    assert check_style.check_text("tests/unit/test_x.py", text)[1] == []


def ruff_codes(path: str, text: str) -> str:
    command = [RUFF, "check", "--stdin-filename", path, "--output-format", "concise", "-"]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("agent/x.py", "import time\n\nNOW = time.time()\n", "agent.clock"),
        ("coordinator/x.py", "from datetime import datetime\n\nNOW = datetime.now()\n", "take `now`"),
        ("coordinator/x.py", "import uuid\n\nNAME = uuid.uuid4()\n", "injected maker"),
        ("tests/unit/test_x.py", "from unittest.mock import patch\n\npatch()\n", "testing.py"),
        ("agent/x.py", 'print("hello")\n', "T201"),
        ("agent/x.py", "try:\n    x = 1\nexcept Exception:\n    pass\n", "S110"),
        ("agent/x.py", "import time\n\n\nasync def f() -> None:\n    time.sleep(1)\n", "ASYNC251"),
    ],
)
def test_ruff_is_configured_to_find(path: str, text: str, expected: str) -> None:
    assert expected in ruff_codes(path, text)


def test_the_clock_modules_may_read_the_clock() -> None:
    assert "TID251" not in ruff_codes("agent/clock.py", "import time\n\nNOW = time.time()\n")
