"""What is put on a machine is taken off again: the file system before and after, below a root of the test's own."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent.errors import ConfigInvalid
from agent.service.install import Machine, install_service, plan_files, uninstall
from agent.service.units import UnitPlan

STATE = Path("/var/lib/slackwater-agent")
CONFIG = Path("/etc/slackwater/agent.toml")
PLAN = UnitPlan(command=("/usr/bin/python3", "-P", "-m", "agent"), config=CONFIG, state_dir=STATE)


def refuse(command: Sequence[str]) -> str:
    raise AssertionError(f"{command} was called below a root of the test's own")


def nothing() -> None:
    """No engine runs."""


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
    uninstall(PLAN, machine, lambda line: None, clean_up=nothing, purge=True)
    assert listing(machine) == before
    assert not machine.place(STATE).exists()
    assert not machine.place(CONFIG).parent.exists()


def test_without_purge_the_state_is_kept_and_said_to_be(machine: Machine) -> None:
    give_state(machine)
    before, lines = listing(machine), list[str]()
    install_service(PLAN, machine, lines.append)
    uninstall(PLAN, machine, lines.append, clean_up=nothing)
    assert listing(machine) == before
    assert any("`uninstall --purge` removes it" in line for line in lines)


def test_installing_twice_and_removing_what_was_never_installed_are_no_errors(machine: Machine) -> None:
    before = listing(machine)
    uninstall(PLAN, machine, lambda line: None, clean_up=nothing, purge=True)
    install_service(PLAN, machine, lambda line: None)
    install_service(PLAN, machine, lambda line: None)
    uninstall(PLAN, machine, lambda line: None, clean_up=nothing)
    assert listing(machine) == before


def test_a_dry_run_shows_every_file_and_writes_none(machine: Machine) -> None:
    before, lines = listing(machine), list[str]()
    install_service(PLAN, machine, lines.append, dry_run=True)
    assert listing(machine) == before
    assert len(lines) == len(plan_files(PLAN, machine))
    assert any("Type=notify" in line for line in lines)


def test_a_service_of_ones_own_lies_in_ones_own_home_with_a_companion_that_finds_it(machine: Machine) -> None:
    """Mutation seen to fail here: the companion without `--socket`, which then reports to the machine's agent."""
    own = Machine(root=machine.root, user_session=True, home=Path("/home", "anna"), run=refuse)
    units = Path("/home", "anna", ".config/systemd/user")
    files = plan_files(PLAN, own)
    assert list(files) == [units / "slackwater-agent.service", units / "slackwater-companion.service"]
    agent, companion = files.values()
    # %t is the user's runtime directory, where systemd makes RuntimeDirectory= of a user's unit.
    assert "RuntimeDirectory=slackwater-agent\n" in agent
    assert "-m agent.session_companion --socket %t/slackwater-agent/signals.sock\n" in companion


@pytest.mark.skipif(os.geteuid() != 0, reason="root is told apart from others")
def test_root_is_told_not_to_install_a_service_of_its_own_session() -> None:
    with pytest.raises(ConfigInvalid, match="without sudo"):
        install_service(PLAN, Machine(user_session=True, run=refuse), lambda line: None)


def test_what_is_left_running_keeps_the_files_so_that_it_can_be_tried_again(machine: Machine) -> None:
    """Mutation seen to fail here: clean up last."""
    give_state(machine)
    install_service(PLAN, machine, lambda line: None)
    before = listing(machine)

    def survive() -> None:
        raise ConfigInvalid("another agent runs")

    with pytest.raises(ConfigInvalid, match="another agent runs"):
        uninstall(PLAN, machine, lambda line: None, clean_up=survive, purge=True)
    assert listing(machine) == before
