"""Why the coordinator did not start, or cannot go on: one line and an exit status.

The statuses are those of BSD's sysexits.h, so that a service manager can tell
what a restart may cure (75) from what needs a person (all others).
"""

import errno
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit statuses of slackwater-coordinator, as documented in its help."""

    OK = 0
    BAD_USAGE = 64  # wrong argument on the command line
    BAD_DATA = 65  # a file's content is wrong: hash, signature, key
    NO_INPUT = 66  # a named file is missing
    UNAVAILABLE = 69  # the database cannot be reached or used
    INTERNAL = 70  # our bug
    IO_ERROR = 74  # the disk is full or broken
    TRY_AGAIN = 75  # a port is in use, another coordinator runs on this state directory
    NO_PERMISSION = 77  # a file or directory cannot be read or written
    BAD_CONFIG = 78  # the configuration cannot be read or is wrong


class StartupError(Exception):
    """The message is one line that says what, where, and what to do."""

    def __init__(self, exit_code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def describe_os_error(error: OSError, doing: str) -> StartupError:
    """Return the one line for an operating system error; `doing` is for example "write /var/lib/x"."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StartupError(ExitCode.IO_ERROR, f"cannot {doing}: the disk is full; free some space and start again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StartupError(
            ExitCode.NO_PERMISSION, f"cannot {doing}: {error.strerror}; check owner and mode of that path"
        )
    if error.errno == errno.ENOENT:
        return StartupError(ExitCode.NO_INPUT, f"cannot {doing}: no such file or directory")
    return StartupError(ExitCode.IO_ERROR, f"cannot {doing}: {error.strerror or error}")
