"""What is put on a machine is taken off again: the file system before and after, below a root of the test's own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent.engine_processes import MARKER_VARIABLE
from agent.errors import ConfigInvalid
from agent.service.install import Machine, install_service, plan_files, uninstall
from agent.service.units import UnitPlan

STATE = Path("/var/lib/slackwater-agent")
CONFIG = Path("/etc/slackwater/agent.toml")
PLAN = UnitPlan(command=("/usr/bin/python3", "-P", "-m", "agent"), config=CONFIG, state_dir=STATE)


def refuse(command: Sequence[str]) -> str:
    raise AssertionError(f"{command} was called below a root of the test's own")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    (tmp_path / "etc/systemd/system/sshd.service").write_text("[Service]\n")
    (tmp_path / "var/lib").mkdir(parents=True)
    return Machine(root=tmp_path, run=refuse)


def listing(machine: Machine) -> set[Path]:
    return {path.relative_to(machine.root) for path in machine.root.rglob("*") if not path.is_dir()}


def give_state(machine: Machine) -> None:
    """Make what join, install-engine and a run leave behind."""
    state = machine.place(STATE)
    (state / "engines/main/home").mkdir(parents=True)
    (state / "environments/torch-1.0-abc").mkdir(parents=True)
    (state / "environments/torch").symlink_to("torch-1.0-abc")
    (state / "identity.json").write_text("{}")
    machine.place(CONFIG).parent.mkdir(parents=True)
    machine.place(CONFIG).write_text("")


def test_a_purge_leaves_the_file_system_as_it_was(machine: Machine) -> None:
    """Mutation seen to fail here: leave the companion out of what is removed."""
    before = listing(machine)
    give_state(machine)
    install_service(PLAN, machine, lambda line: None)
    assert listing(machine) > before
    uninstall(PLAN, "slackwater-test", machine, lambda line: None, purge=True)
    assert listing(machine) == before
    assert not machine.place(STATE).exists()
    assert not machine.place(CONFIG).parent.exists()


def test_without_purge_the_state_is_kept_and_said_to_be(machine: Machine) -> None:
    give_state(machine)
    before, lines = listing(machine), list[str]()
    install_service(PLAN, machine, lines.append)
    uninstall(PLAN, "slackwater-test", machine, lines.append)
    assert listing(machine) == before
    assert any("`uninstall --purge` removes it" in line for line in lines)


def test_installing_twice_and_removing_what_was_never_installed_are_no_errors(machine: Machine) -> None:
    before = listing(machine)
    uninstall(PLAN, "slackwater-test", machine, lambda line: None, purge=True)
    install_service(PLAN, machine, lambda line: None)
    install_service(PLAN, machine, lambda line: None)
    uninstall(PLAN, "slackwater-test", machine, lambda line: None)
    assert listing(machine) == before


def test_a_dry_run_shows_every_file_and_writes_none(machine: Machine) -> None:
    before, lines = listing(machine), list[str]()
    install_service(PLAN, machine, lines.append, dry_run=True)
    assert listing(machine) == before
    assert len(lines) == len(plan_files(PLAN, machine))
    assert any("Type=notify" in line for line in lines)


def test_a_service_of_ones_own_is_one_file_in_ones_own_home(machine: Machine) -> None:
    own = Machine(root=machine.root, user_session=True, home=Path("/home/anna"), run=refuse)
    assert [str(path) for path in plan_files(PLAN, own)] == ["/home/anna/.config/systemd/user/slackwater-agent.service"]


@pytest.mark.skipif(os.geteuid() != 0, reason="root is told apart from others")
def test_root_is_told_not_to_install_a_service_of_its_own_session() -> None:
    with pytest.raises(ConfigInvalid, match="without sudo"):
        install_service(PLAN, Machine(user_session=True, run=refuse), lambda line: None)


def test_no_engine_process_is_left_behind(machine: Machine) -> None:
    """Mutation seen to fail here: leave out end_engines."""
    environment = os.environ | {MARKER_VARIABLE: f"slackwater-test-{os.getpid()}/main"}
    program = [sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"]
    with subprocess.Popen(program, env=environment) as engine:
        lines = list[str]()
        uninstall(PLAN, f"slackwater-test-{os.getpid()}", machine, lines.append)
        assert engine.wait(5) == -9
    assert any(str(engine.pid) in line for line in lines)
