"""The committed code is what the .proto files give, byte for byte."""

import subprocess
import sys
from pathlib import Path

import gen_protos
import pytest

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).parent / "buf"


@pytest.fixture(scope="module")
def wanted() -> dict[Path, str]:
    return gen_protos.generate()


def test_the_committed_code_is_up_to_date(wanted: dict[Path, str]) -> None:
    # Mutation: adding a field to any .proto without `make protos` makes this fail.
    assert gen_protos.differences(wanted) == []


def test_an_edited_a_missing_and_a_left_over_file_are_each_named(wanted: dict[Path, str]) -> None:
    edited, missing, left_over, *_ = sorted(wanted)
    changed = dict(wanted)
    changed[edited] += "# edited by hand\n"
    changed[missing.with_name("never_made_pb2.py")] = ""
    del changed[left_over]
    found = gen_protos.differences(changed)
    assert sorted(line.rsplit(": ", 1)[1] for line in found) == [
        "differs from what the protos give",
        "missing",
        "no .proto makes it any more",
    ]


def test_generated_imports_leave_the_name_slackwater_to_the_sdk(wanted: dict[Path, str]) -> None:
    for path, text in wanted.items():
        if "sdk" not in path.relative_to(ROOT).parts:
            assert "\nfrom slackwater." not in text, path
            assert "\nimport slackwater." not in text, path
        else:
            assert "\nfrom protos." not in text, path


def test_the_protos_pass_buf_lint() -> None:
    result = subprocess.run([BUF, "lint"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_every_rpc_comment_says_who_may_call() -> None:
    """Rule: the reader of a service learns who may call without opening the access table."""
    silent = []
    for path in sorted((ROOT / "protos").rglob("*_service.proto")):
        comment = ""
        for line in path.read_text().splitlines():
            stripped = line.strip()
            if stripped.startswith("//"):
                comment += stripped
            elif stripped.startswith("rpc "):
                if "Caller:" not in comment:
                    silent.append(f"{path.name}: {stripped}")
                comment = ""
            else:
                comment = ""
    assert silent == []
