"""What root does in the state directory of a service's user leaves everything to that user."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.identity import give_all, keep_owners, lock_state_dir, write_private

# Any user but root; it need not exist.
UID = 64_123

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    os.chown(directory, UID, UID)
    return directory


def owners(directory: Path) -> set[int]:
    return {path.lstat().st_uid for path in directory.rglob("*")}


def test_what_root_writes_belongs_to_the_owner_of_the_directory(state_dir: Path) -> None:
    """Mutation seen to fail here: leave the lock file out."""
    with lock_state_dir(state_dir):
        write_private(state_dir / "identity.json", b"{}")
    assert owners(state_dir) == {UID}


def test_everything_below_is_given_back_and_nothing_behind_a_link(state_dir: Path, tmp_path: Path) -> None:
    """Mutation seen to fail here: follow links."""
    secret = tmp_path / "secret"
    secret.touch()
    (state_dir / "engines/main").mkdir(parents=True)
    (state_dir / "engines/main/link").symlink_to(secret)
    (state_dir / "engines/outside").symlink_to(tmp_path)
    keep_owners(state_dir)
    assert owners(state_dir) == {UID}
    assert secret.stat().st_uid == 0
    give_all(state_dir, 0, 0)
    assert owners(state_dir) == {0}


def test_a_command_under_sudo_becomes_the_owner_for_good(state_dir: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from agent.cli.options import act_as_owner; "
        "act_as_owner(Path(sys.argv[1])); print(os.getresuid(), os.getresgid(), os.getgroups())"
    )
    os.chmod(state_dir.parent, 0o755)
    done = subprocess.run([sys.executable, "-c", program, state_dir], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"({UID}, {UID}, {UID}) ({UID}, {UID}, {UID}) []"


def test_a_directory_of_roots_own_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    keep_owners(tmp_path)
    assert owners(tmp_path) == {0}
