"""Running an engine without network and without the agent's keys, where this machine allows it.

A fence is what a probe proved, by running a program inside it that tries to get
out; nothing is inferred from a version or a file. Three kinds: bubblewrap,
`unshare` with namespaces of its own, or none.

Inside, there is only a loopback interface, the agent's state directory is
covered (engine home and model stay visible), and no capability is left.
Sockets with a path go on working, since they are no part of a network
namespace. The rest of the file system stays readable: a fence keeps keys and
network from an engine that was taken over, not the owner's other files.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

# Two interpreters start in it; a busy two-core machine takes about one second.
PROBE_TIMEOUT_S = 20.0

_ENGINE_EXEC = Path(__file__).with_name("engine_exec.py")

# Run inside the fence: exits with 0 only if everything that must be closed is closed and what must work works.
_PROBE_PROGRAM = """
import os, socket, sys
hidden, kept, outside = sys.argv[1:]
assert not os.path.exists(os.path.join(hidden, "secret")), "the keys can be read"
open(os.path.join(kept, "written"), "w").close()
assert [name for _, name in socket.if_nameindex()] == ["lo"], "there is a network"
listener = socket.create_server(("127.0.0.1", 0))
socket.create_connection(listener.getsockname(), timeout=5).close()
socket.socket(socket.AF_UNIX).bind(os.path.join(outside, "socket"))
with open("/proc/self/status") as status:
    bounding = next(line for line in status if line.startswith("CapBnd"))
assert int(bounding.split()[1], 16) == 0, "capabilities are left"
"""


class FenceKind(Enum):
    BUBBLEWRAP = "bubblewrap"
    UNSHARE = "unshare"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Fence:
    """How engines are started on this machine. Made by `probe_fence` alone, except in tests."""

    kind: FenceKind
    program: str = ""

    @property
    def closed(self) -> bool:
        """Whether network and keys are out of reach, as the probe found."""
        return self.kind is not FenceKind.NONE

    def wrap(self, argv: Sequence[str], *, hide: Path, keep: Sequence[Path], writable: Sequence[Path]) -> list[str]:
        """Return the command that runs `argv` behind this fence and ends it with the agent.

        Args:
            hide: the directory with the agent's keys.
            keep: directories that stay readable even if they lie below `hide`.
            writable: likewise, and the only ones that bubblewrap lets be written to.
        """
        # Mounts act on what a path leads to, so a link on the way must not decide what is covered.
        hide = hide.resolve()
        keep, writable = [path.resolve() for path in keep], [path.resolve() for path in writable]
        visible = [path for path in (*keep, *writable) if path.is_relative_to(hide)]
        match self.kind:
            case FenceKind.NONE:
                return [*_stage(), "--", *argv]
            case FenceKind.UNSHARE:
                namespaces = [self.program, "--user", "--net", "--mount", "--ipc", "--map-root-user", "--"]
                inside = ["--loopback", "--drop-capabilities", "--hide", str(hide)]
                inside += [part for path in visible for part in ("--keep", str(path))]
                return [*namespaces, *_stage(), *inside, "--", *argv]
            case FenceKind.BUBBLEWRAP:
                inside = ["--unshare-user", "--unshare-net", "--unshare-ipc", "--die-with-parent", "--cap-drop", "ALL"]
                inside += ["--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--tmpfs", str(hide)]
                inside += [part for path in keep for part in ("--ro-bind", str(path), str(path))]
                inside += [part for path in writable for part in ("--bind", str(path), str(path))]
                return [*_stage(), "--", self.program, *inside, "--", *argv]


@cache
def probe_fence() -> Fence:
    """Return the strongest fence that works here. Blocks for about a second the first time; run it in a thread."""
    for kind, name in ((FenceKind.BUBBLEWRAP, "bwrap"), (FenceKind.UNSHARE, "unshare")):
        program = shutil.which(name)
        if program is not None and holds(Fence(kind, program)):
            return Fence(kind, program)
    return Fence(FenceKind.NONE)


def holds(fence: Fence) -> bool:
    """Whether a program inside the fence finds network and keys out of reach, and its own directories in reach."""
    with tempfile.TemporaryDirectory(prefix="slackwater-probe-") as name:
        hidden, outside = Path(name, "state"), Path(name, "run")
        kept = hidden / "home"
        kept.mkdir(parents=True)
        outside.mkdir()
        (hidden / "secret").write_text("a key")
        probe = [sys.executable, "-I", "-c", _PROBE_PROGRAM, str(hidden), str(kept), str(outside)]
        argv = fence.wrap(probe, hide=hidden, keep=(), writable=(kept, outside))
        try:
            result = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return result.returncode == 0


def _stage() -> list[str]:
    """Return the start of a command line that runs `engine_exec` as a child of this process."""
    return [sys.executable, "-I", "-S", str(_ENGINE_EXEC), "--parent", str(os.getpid())]
