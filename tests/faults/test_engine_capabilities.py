"""What the service is granted for power limits does not reach an engine, fence or no fence."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import agent.engines.engine_exec

SETPRIV = shutil.which("setpriv")
PYTHON = Path("/usr/bin/python3")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or SETPRIV is None or not PYTHON.exists(), reason="needs root, setpriv and the system's Python"
)


def effective_capabilities(*program: str | Path) -> int:
    """Run a program as a user who was granted CAP_SYS_ADMIN, and return what it can do."""
    granted = ["--reuid=64123", "--clear-groups", "--inh-caps=+sys_admin", "--ambient-caps=+sys_admin"]
    command = [str(SETPRIV), *granted, "--", *map(str, program), "/bin/cat", "/proc/self/status"]
    status = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    assert found is not None
    return int(found[1], 16)


def test_an_engine_has_none_of_the_agents_capabilities() -> None:
    """Mutation seen to fail here: leave out clear_ambient_capabilities."""
    assert effective_capabilities() == 1 << 21, "the test itself grants it"
    stage = Path(agent.engines.engine_exec.__file__)
    assert effective_capabilities(PYTHON, "-I", "-S", stage, "--parent", str(os.getpid()), "--") == 0
