"""The units as systemd reads them; how hardened they are is asked of systemd itself where it is installed."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from agent.errors import ExitStatus
from agent.service.units import COMPANION, SERVICE, UnitPlan, companion_unit, quote, system_unit, sysusers, user_unit

HOME = Path("/home", "anna")
PLAN = UnitPlan(
    command=("/usr/bin/python3", "-P", "-m", "agent"),
    config=Path("/etc/slackwater/agent.toml"),
    state_dir=Path("/var/lib/slackwater-agent"),
    read=(Path("/usr"), HOME / "venv", HOME / "venv/lib", Path("/srv/models")),
    groups=("video", "input"),
)
# Of ten, ten being wide open. systemd 252 counts 3.0 for the system unit; what is left is the network, the cards,
# and the name spaces and mounts that the engines' fence is made of.
EXPOSURE_MAX = 3.0


def parse(text: str) -> dict[str, list[str]]:
    """Return the settings of [Service]; each may stand several times."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_agent_has_a_user_of_its_own_no_privilege_and_one_directory() -> None:
    unit = parse(system_unit(PLAN))
    assert unit["User"] == ["slackwater"]
    assert unit["StateDirectoryMode"] == ["0700"]
    assert unit["ProtectSystem"] == ["strict"]
    assert unit["CapabilityBoundingSet"] == unit["AmbientCapabilities"] == [""]
    assert unit["NoNewPrivileges"] == ["yes"]
    assert "ReadWritePaths" not in unit
    assert unit["DevicePolicy"] == ["closed"]


def test_what_lies_in_a_home_is_shown_once_and_nothing_else_of_that_home() -> None:
    """Mutation seen to fail here: leave out the comparison with the outer directory."""
    unit = parse(system_unit(PLAN))
    assert unit["TemporaryFileSystem"] == ["/home:ro /root:ro"]
    assert unit["BindReadOnlyPaths"] == [str(HOME / "venv")]


def test_the_fence_of_the_engines_finds_the_name_spaces_and_calls_it_needs() -> None:
    unit = parse(system_unit(PLAN))
    assert set(unit["RestrictNamespaces"][0].split()) >= {"user", "net", "mnt", "ipc"}
    assert "@mount" in unit["SystemCallFilter"][0]
    assert "MemoryDenyWriteExecute" not in unit


def test_only_what_a_restart_may_cure_is_restarted() -> None:
    unit = parse(system_unit(PLAN))
    lasting = {int(status) for status in unit["RestartPreventExitStatus"][0].split()}
    assert lasting == set(range(2, 9))
    assert int(ExitStatus.DISK_FAILED) not in lasting
    assert unit["Restart"] == ["on-failure"]
    assert unit["Type"] == ["notify"]
    assert unit["WatchdogSec"] == ["60"]


def test_whatever_ends_the_agent_its_traces_are_cleaned_up() -> None:
    for text in (system_unit(PLAN), user_unit(PLAN)):
        unit = parse(text)
        assert unit["ExecStopPost"] == ["/usr/bin/python3 -P -m agent clean-up --config /etc/slackwater/agent.toml"]
        assert unit["KillMode"] == ["mixed"]


def test_a_power_cap_costs_a_privilege_only_where_it_is_asked_for() -> None:
    unit = parse(system_unit(UnitPlan(**{name: getattr(PLAN, name) for name in PLAN.__slots__} | {"power_cap": True})))
    assert unit["CapabilityBoundingSet"] == unit["AmbientCapabilities"] == ["CAP_SYS_ADMIN"]


def test_a_state_directory_elsewhere_can_be_written() -> None:
    moved = UnitPlan(command=PLAN.command, config=PLAN.config, state_dir=Path("/data/agent of anna"))
    assert parse(system_unit(moved))["ReadWritePaths"] == ['"/data/agent of anna"']


def test_a_store_of_models_elsewhere_can_be_written() -> None:
    elsewhere = UnitPlan(
        command=PLAN.command, config=PLAN.config, state_dir=PLAN.state_dir, write=(Path("/srv/models"),)
    )
    assert parse(system_unit(elsewhere))["ReadWritePaths"] == ["/srv/models"]


@pytest.mark.parametrize(
    ("text", "quoted"),
    [("/opt/a", "/opt/a"), ("/opt/100%", "/opt/100%%"), ("/a b", '"/a b"'), ("$HOME", "$$HOME"), ('a"b', '"a\\"b"')],
)
def test_words_mean_to_systemd_what_they_are(text: str, quoted: str) -> None:
    assert quote(text) == quoted


def test_the_companion_speaks_over_sockets_of_this_machine_alone() -> None:
    unit = parse(companion_unit(PLAN))
    assert unit["RestrictAddressFamilies"] == ["AF_UNIX"]
    assert unit["ExecStart"] == ["/usr/bin/python3 -P -m agent.session_companion"]


def test_the_user_is_described_as_sysusers_wants_it() -> None:
    assert sysusers(PLAN) == 'u slackwater - "Slackwater agent" /var/lib/slackwater-agent /usr/sbin/nologin\n'


def test_units_are_ini_files_with_the_three_sections() -> None:
    for text in (system_unit(PLAN), user_unit(PLAN), companion_unit(PLAN)):
        parser = configparser.RawConfigParser(strict=False)
        parser.read_string(text)
        assert parser.sections() == ["Unit", "Service", "Install"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
def test_systemd_itself_finds_no_fault(tmp_path: Path) -> None:
    units = {SERVICE: system_unit(PLAN), COMPANION: companion_unit(PLAN)}
    for name, text in units.items():
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in units]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if any(name in line for name in units)]
    assert complaints == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
def test_systemd_itself_counts_little_exposure(tmp_path: Path) -> None:
    """Mutation seen to fail here: drop CapabilityBoundingSet, SystemCallFilter and ProtectSystem."""
    (tmp_path / SERVICE).write_text(system_unit(PLAN))
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE_MAX * 10:.0f}"]
    done = subprocess.run([*command, str(tmp_path / SERVICE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
