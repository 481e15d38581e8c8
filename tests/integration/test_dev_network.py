"""scripts/dev_network.py as others use it: a process that says where the network is, and cleans up after itself."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "dev_network.py"
KEYS = {
    "gateway_url",
    "grpc_address",
    "ca_file",
    "api_key",
    "admin_key",
    "coordinator_pid",
    "agents",
    "state_dir",
    "model",
}
# Until the kernel has taken killed processes away, on a machine that is busy.
GONE_S = 20.0


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, SCRIPT, "--json", *arguments], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def network() -> Iterator[subprocess.Popen[str]]:
    process = start("--agents", "2", "--engine", "fake")
    yield process
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    assert process.stdout is not None
    process.stdout.close()


def read_line(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    ready: dict[str, object] = json.loads(process.stdout.readline())
    return ready


def pids(ready: dict[str, object]) -> list[int]:
    agents = ready["agents"]
    assert isinstance(agents, list)
    return [int(str(ready["coordinator_pid"])), *(agent[key] for agent in agents for key in ("pid", "engine_pid"))]


def wait_until_gone(numbers: list[int]) -> list[int]:
    """Return which processes are still alive after a while."""
    deadline_s = time.monotonic() + GONE_S
    while time.monotonic() < deadline_s:
        alive = [n for n in numbers if psutil.pid_exists(n) and psutil.Process(n).status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return []
        time.sleep(0.1)
    return alive


def test_one_line_tells_all_and_sigterm_leaves_nothing(network: subprocess.Popen[str]) -> None:
    # Mutation: leaving out kill_marked and rmtree in DevNetwork._clean_up makes the last two lines fail.
    ready = read_line(network)
    assert set(ready) == KEYS
    agents = ready["agents"]
    assert isinstance(agents, list)
    assert len({agent["node_id"] for agent in agents}) == 2
    assert all(psutil.pid_exists(pid) for pid in pids(ready))
    with urllib.request.urlopen(f"{ready['gateway_url']}/readyz", timeout=10) as response:
        assert response.status == 200

    network.send_signal(signal.SIGTERM)
    assert network.wait(timeout=60) == 0
    assert wait_until_gone(pids(ready)) == []
    assert not Path(str(ready["state_dir"])).exists()


def test_a_killed_agent_does_not_end_the_network_and_its_engine_dies(network: subprocess.Popen[str]) -> None:
    """Killing agents from outside is what the script is for."""
    ready = read_line(network)
    agents = ready["agents"]
    assert isinstance(agents, list)
    os.kill(agents[0]["pid"], signal.SIGKILL)
    assert wait_until_gone([agents[0]["pid"], agents[0]["engine_pid"]]) == []
    assert network.poll() is None
    with urllib.request.urlopen(f"{ready['gateway_url']}/readyz", timeout=10) as response:
        assert response.status == 200


def test_nothing_survives_a_script_that_was_killed_itself() -> None:
    # Mutation: starting children without _TIE leaves coordinator and agents behind.
    process = start("--agents", "1", "--engine", "fake")
    ready = read_line(process)
    process.kill()
    process.wait(timeout=10)
    assert process.stdout is not None
    process.stdout.close()
    gone = wait_until_gone(pids(ready))
    # Files cannot clean themselves up; only this.
    shutil.rmtree(str(ready["state_dir"]))
    assert gone == []


def test_a_signal_during_the_start_cleans_up_too(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, SCRIPT, "--json", "--agents", "1"], env=environment)
    deadline_s = time.monotonic() + GONE_S
    while not list(tmp_path.glob("sw-dev-*/coordinator.log")) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_number_of_agents_is_one_line_and_a_status() -> None:
    result = subprocess.run([sys.executable, SCRIPT, "--agents", "0"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "--agents must be at least 1" in result.stderr
