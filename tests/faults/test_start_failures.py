"""What the programs say when they cannot start: one line on standard error, a documented exit status, no traceback.

What one command line of the coordinator refuses is in
tests/integration/test_coordinator_process.py; here are the faults of disks,
files and databases, for both programs.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from agent.enrolment import join
from agent.errors import ExitStatus
from agent.testing import write_model
from agent.testing_coordinator import ScriptedCoordinator, accept_terms
from coordinator.startup import ExitCode

ROOT = Path(__file__).parents[2]
# A start makes keys and a database; on a machine that is busy with other tests that takes seconds.
START_TIMEOUT_S = 60
NOBODY = 65534

COORDINATOR_SETTINGS: dict[str, object] = {
    "state_dir": "state",
    "public_listen": "127.0.0.1:0",
    "node_listen": "127.0.0.1:0",
    "gateway_listen": "127.0.0.1:0",
}
AGENT_CONFIG = """
state_dir = "state"
[[engines]]
engine_id = "main"
kind = "fake"
model_directory = "model"
"""

# Half a hundred starts of real processes: a minute.
pytestmark = pytest.mark.slow


def start(
    module: str, directory: Path, *arguments: str, prepare: str = "", unprivileged: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program in a directory until it ends by itself.

    Args:
        prepare: shell commands that run first, in a mount namespace of its own.
        unprivileged: root too may then do with files only what their modes allow.
    """
    command = [sys.executable, "-m", module, *arguments]
    if unprivileged and os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    if prepare:
        if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode != 0:
            pytest.skip("needs a mount namespace of its own (unshare -rm)")
        command = ["unshare", "-rm", "sh", "-c", f'{prepare} && exec "$0" "$@"', *command]
    return subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=START_TIMEOUT_S,
    )


def assert_refused(done: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    """One line for people, which comes last, and the status."""
    said = [line for line in done.stderr.splitlines() if line.startswith("slackwater-")]
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert said == done.stderr.splitlines()[-1:], done.stderr
    for word in words:
        assert word in said[0], said


def configure(tmp_path: Path, **settings: object) -> None:
    merged = {**COORDINATOR_SETTINGS, **settings}
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in merged.items())
    (tmp_path / "coordinator.toml").write_text(text)


def start_coordinator(directory: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return start("coordinator", directory, "run", "--config", "coordinator.toml", **options)


def write_key(path: Path, key: Ed25519PrivateKey) -> None:
    path.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


# ---- the coordinator


@pytest.mark.parametrize("size_kib", [4, 24, 32, 112])
def test_a_disk_that_fills_up_during_the_coordinators_start_is_one_line(tmp_path: Path, size_kib: int) -> None:
    """Full at the first key, at the database, in the middle of its schema, and after it."""
    configure(tmp_path)
    (tmp_path / "state").mkdir()
    done = start_coordinator(tmp_path, prepare=f"mount -t tmpfs -o size={size_kib}k tmpfs state")
    assert_refused(done, ExitCode.IO_ERROR if size_kib == 4 else ExitCode.UNAVAILABLE, "disk")


def test_a_state_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    configure(tmp_path)
    (tmp_path / "state").mkdir()
    done = start_coordinator(tmp_path, prepare="mount -t tmpfs tmpfs state && mount -o remount,ro state")
    assert_refused(done, ExitCode.NO_PERMISSION, "state", "Read-only")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_state_directory_of_somebody_else_is_one_line(tmp_path: Path) -> None:
    configure(tmp_path)
    (tmp_path / "state").mkdir(mode=0o700)
    os.chown(tmp_path / "state", NOBODY, NOBODY)
    assert_refused(start_coordinator(tmp_path, unprivileged=True), ExitCode.NO_PERMISSION, "state")


def test_a_state_directory_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    configure(tmp_path)
    (tmp_path / "state").write_text("no directory")
    assert_refused(start_coordinator(tmp_path), ExitCode.IO_ERROR, "state")


def test_a_database_of_a_newer_release_is_left_alone(tmp_path: Path) -> None:
    """Mutation seen to fail: the error of alembic is not translated."""
    configure(tmp_path)
    assert start("coordinator", tmp_path, "init", "--config", "coordinator.toml").returncode == 0
    database = sa.create_engine(f"sqlite:///{tmp_path}/state/coordinator.db")
    with database.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    database.dispose()
    assert_refused(start_coordinator(tmp_path), ExitCode.UNAVAILABLE, "coordinator.db", "a newer release wrote it")
    with database.begin() as connection:
        assert connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one() == "9999"
    database.dispose()


@pytest.mark.parametrize("name", ["ca.key", "seed.key"])
def test_a_damaged_key_is_one_line_and_never_replaced(tmp_path: Path, name: str) -> None:
    configure(tmp_path)
    keys = tmp_path / "state" / "keys"
    keys.mkdir(parents=True)
    (keys / name).write_bytes(b"damaged")
    assert_refused(start_coordinator(tmp_path), ExitCode.BAD_DATA, name)
    assert (keys / name).read_bytes() == b"damaged"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\xff\xfe\x00", "TOML"),
        (b'state_dir = "state"\ncolour = "red"', "colour"),
    ],
)
def test_a_wrong_configuration_of_the_coordinator_is_one_line(tmp_path: Path, content: bytes, word: str) -> None:
    (tmp_path / "coordinator.toml").write_bytes(content)
    assert_refused(start_coordinator(tmp_path), ExitCode.BAD_CONFIG, "coordinator.toml", word)


def test_a_configuration_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "coordinator.toml").mkdir()
    assert_refused(start_coordinator(tmp_path), ExitCode.BAD_CONFIG, "coordinator.toml", "directory")
    (tmp_path / "agent.toml").mkdir()
    assert_refused(start_agent(tmp_path), ExitStatus.CONFIG_INVALID, "agent.toml", "directory")


@pytest.mark.parametrize(
    ("damage", "status", "word"),
    [
        pytest.param(lambda model: (model / "tokenizer.json").unlink(), 65, "tokenizer.json", id="a missing file"),
        pytest.param(
            lambda model: (model / "tokenizer.json").write_bytes(b"{}"), 65, "tokenizer.json", id="another content"
        ),
        pytest.param(
            lambda model: (model / "manifest.envelope").unlink(), 66, "manifest.envelope", id="a missing manifest"
        ),
        pytest.param(
            lambda model: (model / "manifest.envelope").write_bytes(b""), 65, "signed by", id="an empty manifest"
        ),
        pytest.param(
            lambda model: write_key(model.parent / "release.pub", Ed25519PrivateKey.generate()),
            65,
            "signed by",
            id="a key that did not sign it",
        ),
    ],
)
def test_a_model_that_is_not_what_its_manifest_says_is_one_line(
    tmp_path: Path, damage: Callable[[Path], object], status: int, word: str
) -> None:
    key = Ed25519PrivateKey.generate()
    write_model(tmp_path / "model", key)
    write_key(tmp_path / "release.pub", key)
    configure(tmp_path, models=["model"], release_keys=["release.pub"])
    damage(tmp_path / "model")
    assert_refused(start_coordinator(tmp_path), status, word)


# ---- the agent


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine that has joined, with its model; its coordinator is gone."""
    path = tmp_path_factory.mktemp("machine")

    async def enrol() -> None:
        async with ScriptedCoordinator().serve() as coordinator:
            write_model(path / "model", coordinator.release_key)
            await asyncio.to_thread(join, coordinator.join_string, path / "state", "a label", accept_terms)

    asyncio.run(enrol())
    (path / "agent.toml").write_text(AGENT_CONFIG)
    return path


@pytest.fixture
def machine(joined: Path, tmp_path: Path) -> Path:
    shutil.copytree(joined, tmp_path, dirs_exist_ok=True)
    return tmp_path


def start_agent(directory: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return start("agent", directory, "run", "--config", "agent.toml", **options)


def test_an_agent_on_a_full_disk_is_one_line(machine: Path) -> None:
    """Mutation seen to fail: the status is not written before everything else starts."""
    shutil.move(machine / "state", machine / "kept")
    (machine / "state").mkdir()
    full = "mount -t tmpfs -o size=64k tmpfs state && cp kept/* state && ! head -c 1M /dev/zero 2>&- >state/filler"
    assert_refused(start_agent(machine, prepare=full), ExitStatus.DISK_FAILED, "state", "disk is full")


async def test_joining_with_a_full_disk_is_one_line_and_can_be_tried_again(tmp_path: Path) -> None:
    """Mutation seen to fail: the OSError of the pending key is let through."""
    async with ScriptedCoordinator().serve() as coordinator:
        write_model(tmp_path / "model", coordinator.release_key)
        (tmp_path / "agent.toml").write_text(AGENT_CONFIG)
        (tmp_path / "join").write_text(coordinator.join_string)
        (tmp_path / "state").mkdir()
        full = "mount -t tmpfs -o size=4k tmpfs state && ! head -c 1M /dev/zero 2>&- >state/filler"
        arguments = ("join", "--config", "agent.toml", "--file", "join", "--yes")
        done = await asyncio.to_thread(start, "agent", tmp_path, *arguments, prepare=full)
        assert_refused(done, ExitStatus.DISK_FAILED, "state", "disk is full")
        assert not coordinator.token_used
        done = await asyncio.to_thread(start, "agent", tmp_path, *arguments)
        assert done.returncode == 0, done.stderr


def test_a_state_directory_that_the_agent_cannot_write_is_one_line(machine: Path) -> None:
    prepare = "mount --bind state state && mount -o remount,ro,bind state"
    assert_refused(start_agent(machine, prepare=prepare), ExitStatus.CONFIG_INVALID, "state", "not writable")


def test_files_that_may_not_be_read_are_one_line(machine: Path) -> None:
    (machine / "state" / "identity.json").chmod(0)
    done = start_agent(machine, unprivileged=True)
    assert_refused(done, ExitStatus.NOT_JOINED, "identity.json", "Permission denied")
    (machine / "agent.toml").chmod(0)
    assert_refused(start_agent(machine, unprivileged=True), ExitStatus.CONFIG_INVALID, "agent.toml", "denied")
    configure(machine)
    (machine / "coordinator.toml").chmod(0)
    assert_refused(start_coordinator(machine, unprivileged=True), ExitCode.BAD_CONFIG, "coordinator.toml", "denied")


def test_a_state_directory_of_the_agent_that_is_a_file_is_one_line(machine: Path) -> None:
    shutil.rmtree(machine / "state")
    (machine / "state").write_text("no directory")
    assert_refused(start_agent(machine), ExitStatus.CONFIG_INVALID, "state")


@pytest.mark.parametrize("damage", [b"[]", b"\xff"])
def test_a_damaged_identity_is_one_line(machine: Path, damage: bytes) -> None:
    (machine / "state" / "identity.json").write_bytes(damage)
    assert_refused(start_agent(machine), ExitStatus.NOT_JOINED, "identity.json", "damaged")


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        pytest.param(lambda model: shutil.rmtree(model), "model", id="no directory"),
        pytest.param(lambda model: (model / "manifest.envelope").unlink(), "manifest.envelope", id="no manifest"),
        pytest.param(lambda model: (model / "manifest.envelope").write_bytes(b"x"), "manifest", id="no envelope"),
        pytest.param(lambda model: (model / "config.json").unlink(), "config.json", id="a missing file"),
        pytest.param(lambda model: (model / "config.json").write_bytes(b"{}"), "config.json", id="another content"),
        pytest.param(lambda model: (model / "more.py").write_bytes(b"x"), "more.py", id="a file too many"),
    ],
)
def test_a_model_that_must_not_be_loaded_is_one_line(
    machine: Path, damage: Callable[[Path], object], word: str
) -> None:
    damage(machine / "model")
    assert_refused(start_agent(machine), ExitStatus.NO_ENGINE, word)


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ('kind = "fake"', 'kind = "fake"\ncolour = "red"', "colour"),
        ('state_dir = "state"', "state_dir = ", "TOML"),
    ],
)
def test_a_wrong_configuration_of_the_agent_is_one_line(machine: Path, old: str, new: str, word: str) -> None:
    (machine / "agent.toml").write_text(AGENT_CONFIG.replace(old, new))
    assert_refused(start_agent(machine), ExitStatus.CONFIG_INVALID, word)
