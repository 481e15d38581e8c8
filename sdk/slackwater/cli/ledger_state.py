"""What `slackwater ledger verify` keeps between two runs: the trusted keys, and what it has seen of the log."""

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slackwater.books import Counted, History
from slackwater.cli.session import UsageError

STATE_VERSION = 1
KEY_BYTES = 32


@dataclass(slots=True, kw_only=True)
class LedgerState:
    """Args: `histories` by reader (a tenant's id, or "all"), since each is given other entries."""

    keys: tuple[bytes, ...] = ()
    # The last checkpoint that held, a signed note; None before the first.
    note: bytes | None = None
    histories: dict[str, History] = field(default_factory=dict)
    # A checkpoint that contradicts `note`: together they are the evidence.
    refused: bytes | None = None


def default_path(address: str) -> Path:
    """Return where the state of one coordinator's log lies: beneath $XDG_STATE_HOME, or ~/.local/state."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    name = "".join(character if character.isalnum() or character in ".-" else "_" for character in address)
    return Path(home) / "slackwater" / f"ledger-{name}.json"


def read_state(path: Path) -> LedgerState:
    """Return what is kept; nothing where the file is not there yet."""
    try:
        said = json.loads(path.read_text())
        if said["version"] != STATE_VERSION:
            raise ValueError(f"version {said['version']}")
        return LedgerState(
            keys=tuple(bytes.fromhex(key) for key in said["keys"]),
            note=None if said["note"] is None else said["note"].encode(),
            histories={reader: History(**one) for reader, one in said["histories"].items()},
            refused=None if said["refused"] is None else said["refused"].encode(),
        )
    except FileNotFoundError:
        return LedgerState()
    except (OSError, ValueError, KeyError, TypeError) as error:
        # Never begun anew by itself: that would forget what the coordinator has been held to.
        raise UsageError(f"{path} cannot be read as the state of a ledger ({error!r}); name another file") from error


def write_state(path: Path, state: LedgerState) -> None:
    """Replace the file, mode 0600, whole or not at all."""
    said = {
        "version": STATE_VERSION,
        "keys": [key.hex() for key in state.keys],
        "note": None if state.note is None else state.note.decode(),
        "histories": {reader: asdict(history) for reader, history in state.histories.items()},
        "refused": None if state.refused is None else state.refused.decode(errors="replace"),
    }
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # mkstemp makes it with mode 0600.
        descriptor, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump(said, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def parse_keys(keys: list[str]) -> tuple[bytes, ...]:
    """Return raw public keys from hex."""
    try:
        raw = tuple(bytes.fromhex(key) for key in keys)
    except ValueError as error:
        raise UsageError("--key takes an Ed25519 public key of 64 hexadecimal digits") from error
    if any(len(key) != KEY_BYTES for key in raw):
        raise UsageError("--key takes an Ed25519 public key of 64 hexadecimal digits")
    return raw


def read_counted(path: Path | None) -> dict[str, Counted]:
    """Return what a client has counted: a file of JSON lines with task_id, completion_tokens, perhaps prompt_tokens."""
    if path is None:
        return {}
    counted: dict[str, Counted] = {}
    try:
        for line in path.read_text().splitlines():
            one = json.loads(line)
            prompt = one.get("prompt_tokens")
            counted[str(one["task_id"])] = Counted(
                completion_tokens=int(one["completion_tokens"]), prompt_tokens=None if prompt is None else int(prompt)
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read as counts, one JSON object a line: {error!r}") from error
    return counted
