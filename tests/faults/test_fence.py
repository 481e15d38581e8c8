"""What a fence closes, tried from inside it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent.engines.fence import Fence, FenceKind, holds, probe_fence


def run_inside(fence: Fence, program: str, hide: Path, keep: Path) -> "subprocess.CompletedProcess[str]":
    argv = fence.wrap([sys.executable, "-I", "-c", program], hide=hide, keep=(), writable=(keep,))
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


def test_no_fence_does_not_pass_for_one() -> None:
    """The probe itself can fail. Mutation tried: a probe that only starts a program says yes to no fence at all."""
    assert not holds(Fence(FenceKind.NONE))


def test_a_program_that_is_no_fence_does_not_pass_for_one() -> None:
    # `env` runs what comes behind its own options, and closes nothing.
    assert not holds(Fence(FenceKind.UNSHARE, shutil.which("env") or "env"))
    assert not holds(Fence(FenceKind.BUBBLEWRAP, "/nonexistent/bwrap"))


def test_a_machine_that_allows_namespaces_has_a_fence() -> None:
    """Mutation tried: a stage that keeps its capabilities, or leaves the loopback interface down, is found out."""
    allowed = subprocess.run(
        ["unshare", "--user", "--net", "--mount", "--map-root-user", "true"], capture_output=True, check=False
    )
    if allowed.returncode != 0:
        pytest.skip("this machine allows no user namespaces")
    assert probe_fence().closed


@pytest.mark.skipif(not probe_fence().closed, reason="this machine allows no fence")
def test_what_is_inside_cannot_uncover_the_keys_nor_read_the_agents_memory(tmp_path: Path) -> None:
    hide = tmp_path / "state"
    keep = hide / "home"
    keep.mkdir(parents=True)
    (hide / "identity.json").write_text("a key")
    program = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
assert libc.umount2({str(hide)!r}.encode(), 2) != 0, "uncovered"
assert os.listdir({str(hide)!r}) == ["home"]
parent = os.getppid()
hidden = f"/proc/{{parent}}/root" + {str(hide)!r}
for reach in (lambda: os.listdir(hidden), lambda: os.readlink(f"/proc/{{parent}}/fd/0"),
              lambda: open(f"/proc/{{parent}}/environ", "rb").read(), lambda: open(f"/proc/{{parent}}/mem", "rb")):
    try:
        reach()
    except PermissionError:
        continue
    raise SystemExit("the agent's process is open")
"""
    result = run_inside(probe_fence(), program, hide, keep)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(not probe_fence().closed, reason="this machine allows no fence")
def test_files_in_a_kept_directory_are_the_real_ones(tmp_path: Path) -> None:
    hide = tmp_path / "state"
    keep = hide / "home"
    keep.mkdir(parents=True)
    result = run_inside(probe_fence(), f"open({str(keep / 'made')!r}, 'w').write('inside')", hide, keep)
    assert result.returncode == 0, result.stderr
    assert (keep / "made").read_text() == "inside"
