"""The last checkpoint of the coordinator's ledger on disk, so that no restart lets a rewritten log pass."""

from pathlib import Path

import msgspec
import structlog

from agent.identity import write_private
from agent.ledger.watch import LedgerRecord

LEDGER_FILE = "ledger.json"
# Two notes of 2 KB and a proof of 64 hashes, in base64.
FILE_BYTES_MAX = 16 * 1024

log = structlog.get_logger()


def load_ledger_record(state_dir: Path) -> LedgerRecord:
    """Return what this node remembers; nothing where there is no file, or none that can be read. Blocks on the disk."""
    path = state_dir / LEDGER_FILE
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(FILE_BYTES_MAX), type=LedgerRecord)
    except FileNotFoundError:
        return LedgerRecord()
    except (OSError, ValueError) as error:
        log.error(
            "the last checkpoint of the ledger cannot be read; the next one is taken on trust",
            path=str(path),
            reason=str(error),
        )
        return LedgerRecord()


def store_ledger_record(record: LedgerRecord, state_dir: Path) -> None:
    """Replace the file as a whole; a crash leaves the old record or the new one. Blocks on the disk.

    Raises:
        OSError: the disk is full or broken; the old record stands.
    """
    write_private(state_dir / LEDGER_FILE, msgspec.json.encode(record))
