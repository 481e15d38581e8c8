"""Each check against a machine that has what it looks for; roots are folders of the test's own."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.cards.details import CardDetails, GpuProcess
from agent.cards.use import CardReading
from agent.cli.options import CONFIG_DEFAULT
from agent.config import AgentConfig, parse_config
from agent.doctor import card_checks, engine_checks, host_checks
from agent.doctor.check import Check, Finding, Patient, Probe, Status, exit_status, fail, ok, run_checks, warn
from protos.slackwater.common.v1.capability_pb2 import (
    READING_STATUS_LOST,
    READING_STATUS_OK,
    READING_STATUS_UNSUPPORTED,
    Gpu,
    NumberReading,
    TextReading,
)

GIB = 1024**3
CARD = "GPU-1"


def config(tmp_path: Path, **engine: Any) -> AgentConfig:
    entry = {"engine_id": "main", "kind": "torch", "model_directory": "model", "python": "venv/bin/python"} | engine
    return parse_config({"state_dir": "state", "engines": [entry]}, base=tmp_path)


@pytest.fixture
def patient(tmp_path: Path) -> Callable[..., Patient]:
    def make(**changes: Any) -> Patient:
        values: dict[str, Any] = {
            "config_path": CONFIG_DEFAULT,
            "config": config(tmp_path),
            "root": tmp_path,
            "now_ms": 1_800_000_000_000,
            "kernel_release": "6.8.0-48-generic",
        }
        return Patient(**values | changes)

    return make


def put(root: Path, path: str, text: str = "") -> None:
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def card(*processes: GpuProcess, free_gib: float = 20, **details: Any) -> CardReading:
    gpu = Gpu(
        uuid=TextReading(status=READING_STATUS_OK, value=CARD),
        name=TextReading(status=READING_STATUS_OK, value="RTX 4090"),
        memory_total_bytes=NumberReading(status=READING_STATUS_OK, value=24 * GIB),
        memory_free_bytes=NumberReading(status=READING_STATUS_OK, value=free_gib * GIB),
        power_limit_max_w=NumberReading(status=READING_STATUS_OK, value=450),
    )
    return CardReading(gpu, CardDetails(**{"processes": processes} | details))


def process(name: str, ours: bool = False) -> GpuProcess:
    return GpuProcess(pid=7, name=name, kind="graphics", memory_bytes=GIB, ours=ours)


# ---- the frame


def test_a_check_that_raises_and_one_that_hangs_are_findings_of_their_own(patient: Callable[..., Patient]) -> None:
    """Mutations seen to fail here: let the exception out; wait for the thread instead of its deadline."""
    released = threading.Event()

    def hang(patient: Patient) -> Finding:
        released.wait()
        return ok("too late")

    def trip(patient: Patient) -> Finding:
        raise ZeroDivisionError("a bug")

    probes = [Probe("hangs", hang, 0.05), Probe("trips", trip), Probe("works", lambda patient: ok("fine"))]
    began_at = time.monotonic()
    checks = run_checks(patient(), probes)
    released.set()
    assert time.monotonic() - began_at < 5
    assert [(check.name, check.status) for check in checks] == [
        ("hangs", Status.FAIL),
        ("trips", Status.FAIL),
        ("works", Status.OK),
    ]
    assert "no answer within 0.05 s" in checks[0].cause
    assert "ZeroDivisionError: a bug" in checks[1].cause


def test_only_a_failure_makes_the_exit_status_one() -> None:
    for finding, status in ((ok("x"), 0), (warn("x", "y"), 0), (fail("x", "y"), 1)):
        assert exit_status([Check("one", finding.status, finding.cause, finding.fix)]) == status


def test_commands_name_a_configuration_that_is_not_the_usual_one(patient: Callable[..., Patient]) -> None:
    assert patient().command("run") == "slackwater-agent run"
    other = patient(config_path=Path("/srv/my agent.toml"))
    assert other.command("uninstall", root=True) == "sudo slackwater-agent uninstall --config '/srv/my agent.toml'"


# ---- the machine


def test_a_wrong_configuration_is_told_with_its_reason(patient: Callable[..., Patient]) -> None:
    assert host_checks.check_config(patient()).status is Status.OK
    wrong = host_checks.check_config(patient(config=None, config_error="unknown key lable: did you mean label?"))
    assert (wrong.status, wrong.cause) == (Status.FAIL, "unknown key lable: did you mean label?")


def test_a_state_directory_must_exist_and_be_closed(patient: Callable[..., Patient], tmp_path: Path) -> None:
    assert "has not joined" in host_checks.check_state_directory(patient()).cause
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    open_to_all = host_checks.check_state_directory(patient())
    assert (open_to_all.status, open_to_all.fix) == (Status.FAIL, f"sudo chmod 700 {state}")
    state.chmod(0o700)
    assert host_checks.check_state_directory(patient()).status is Status.OK


def test_wsl_is_found_by_its_kernel_and_needs_the_drivers_folder(
    patient: Callable[..., Patient], tmp_path: Path
) -> None:
    wsl = patient(kernel_release="5.15.167.4-microsoft-standard-WSL2")
    assert host_checks.check_wsl(wsl).status is Status.FAIL
    put(tmp_path, "/usr/lib/wsl/lib/libcuda.so.1")
    assert host_checks.check_wsl(wsl).status is Status.WARN
    assert host_checks.check_wsl(patient()).status is Status.OK


def test_somebody_logged_in_without_a_companion_is_told(patient: Callable[..., Patient], tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    assert host_checks.check_companion(patient()).status is Status.OK
    (tmp_path / "run/user/1234567").mkdir(parents=True)
    assert "1234567 logged in without a companion" in host_checks.check_companion(patient()).cause
    (tmp_path / "run/user/0").mkdir()
    assert " 0" not in host_checks.check_companion(patient()).cause


def test_a_unified_cgroup_is_the_net_below(patient: Callable[..., Patient], tmp_path: Path) -> None:
    assert host_checks.check_cgroup(patient()).status is Status.WARN
    put(tmp_path, "/sys/fs/cgroup/cgroup.controllers")
    put(tmp_path, "/proc/self/cgroup", "0::/system.slice/slackwater-agent.service\n")
    assert host_checks.check_cgroup(patient()).cause.endswith("/system.slice/slackwater-agent.service")


# ---- the cards


@pytest.mark.parametrize(
    ("module", "library", "status", "words"),
    [
        ("580.65.06", "580.65.06", Status.OK, "driver 580.65.06"),
        ("580.65.06", "580.82.07", Status.FAIL, "it was updated under a running system"),
        ("", "580.65.06", Status.FAIL, "no driver is loaded"),
        ("580.65.06", "", Status.OK, "driver 580.65.06"),
    ],
)
def test_driver_and_library_are_of_one_version(
    patient: Callable[..., Patient], tmp_path: Path, module: str, library: str, status: Status, words: str
) -> None:
    if module:
        put(tmp_path, "/sys/module/nvidia/version", module + "\n")
    if library:
        put(tmp_path, f"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{library}")
    finding = card_checks.check_driver(patient())
    assert finding.status is status
    assert words in finding.cause
    assert finding.fix == ("" if status is Status.OK else "sudo modprobe nvidia" if not module else "sudo reboot")


def test_a_card_without_a_driver_gets_the_command_of_its_distribution(
    patient: Callable[..., Patient], tmp_path: Path
) -> None:
    assert card_checks.check_driver(patient()).status is Status.OK
    put(tmp_path, "/sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    put(tmp_path, "/sys/bus/pci/devices/0000:01:00.0/class", "0x030000\n")
    put(tmp_path, "/etc/os-release", 'NAME="Linux Mint"\nID=linuxmint\nID_LIKE="ubuntu debian"\n')
    finding = card_checks.check_driver(patient())
    assert (finding.status, finding.fix) == (Status.FAIL, "sudo ubuntu-drivers install")


def test_device_files_without_a_listing_and_a_card_that_fell_off_are_told(
    patient: Callable[..., Patient], tmp_path: Path
) -> None:
    assert card_checks.check_devices(patient()).status is Status.OK
    put(tmp_path, "/dev/nvidia0")
    empty = card_checks.check_devices(patient(gpu_note="NVML lists no card though /dev has one"))
    assert (empty.status, "NVML lists no card though" in empty.cause) == (Status.FAIL, True)
    assert card_checks.check_devices(patient(cards=(card(),))).status is Status.OK
    lost = card()
    lost.gpu.uuid.status = READING_STATUS_LOST
    assert "1 of 2 cards answer" in card_checks.check_devices(patient(cards=(card(), lost))).cause


def test_who_uses_a_card_is_told_unless_it_is_the_desktop_or_us(patient: Callable[..., Patient]) -> None:
    quiet = (card(process("Xorg"), process("python", ours=True)),)
    assert card_checks.check_use(patient(cards=quiet)).status is Status.OK
    game = card_checks.check_use(patient(cards=(card(process("game")),)))
    assert (game.status, "game (pid 7) on RTX 4090" in game.cause) == (Status.WARN, True)
    unseen = card_checks.check_use(patient(cards=(card(processes=None, processes_note="WSL"),)))
    assert (unseen.status, "cannot be told: WSL" in unseen.cause) == (Status.WARN, True)


def test_memory_that_a_desktop_needs_is_not_counted_as_room(patient: Callable[..., Patient]) -> None:
    assert card_checks.check_memory(patient(cards=(card(free_gib=20),))).status is Status.OK
    assert card_checks.check_memory(patient(cards=(card(free_gib=3),))).status is Status.WARN
    blind = card()
    blind.gpu.memory_free_bytes.status = READING_STATUS_UNSUPPORTED
    assert "does not tell its memory" in card_checks.check_memory(patient(cards=(blind,))).cause


@pytest.mark.parametrize(
    ("capabilities", "status"), [("0000000000000000", Status.WARN), ("0000000000200000", Status.OK)]
)
def test_the_power_limit_asks_for_one_capability(
    patient: Callable[..., Patient], tmp_path: Path, capabilities: str, status: Status
) -> None:
    """Mutation seen to fail here: look at another bit."""
    put(tmp_path, "/proc/self/status", f"Name:\tagent\nCapEff:\t{capabilities}\n")
    assert card_checks.check_power_cap(patient(cards=(card(),))).status is status
    assert card_checks.check_power_cap(patient()).status is Status.OK


def test_the_bindings_here_are_nvidias_own(patient: Callable[..., Patient]) -> None:
    assert card_checks.check_bindings(patient()).status is Status.OK


# ---- the engines


def test_an_interpreter_must_exist_run_and_have_the_engine(patient: Callable[..., Patient], tmp_path: Path) -> None:
    engine = config(tmp_path).engines[0]
    missing = engine_checks.check_installation(engine, patient())
    assert (missing.status, missing.fix) == (Status.FAIL, "slackwater-agent install-engine torch")
    put(tmp_path, "/venv/bin/python", "#!/bin/sh\necho 'torch is not installed' >&2; exit 1\n")
    (tmp_path / "venv/bin/python").chmod(0o755)
    assert "torch is not installed" in engine_checks.check_installation(engine, patient()).cause
    put(tmp_path, "/venv/bin/python", "#!/bin/sh\necho 2.13.0\n")
    assert engine_checks.check_installation(engine, patient()) == ok("torch 2.13.0")


def test_a_flag_that_a_release_no_longer_knows_is_found_by_its_whole_name() -> None:
    """Mutation seen to fail here: look for the flag anywhere in the text."""
    argv = ["python", "-m", "server", "--model", "/m", "--uds", "/s", "--max-num-seqs=4", "--enable-scale-out"]
    help_text = "usage: server [--model MODEL] [--uds UDS]\n  --max-num-seqs N, --no-max-num-seqs\n --enable-scale-outs"
    assert engine_checks.missing_flags(argv, help_text) == ["--enable-scale-out"]
