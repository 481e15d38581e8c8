"""What every command shares: settings, the connection, and how a failure ends the program."""

import os
import stat
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from slackwater import errors

if TYPE_CHECKING:
    from slackwater.blocking import Client


class ExitCode(IntEnum):
    """What the program's exit status means; shown by --help."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    CALLER = 3
    RETRY = 4
    OPERATOR = 5
    UNVERIFIED = 6
    # As shells report a program that a signal ended: 128 + SIGINT, 128 + SIGPIPE.
    INTERRUPTED = 130
    PIPE_CLOSED = 141


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where the coordinator is and who asks. The key itself never comes from the command line."""

    address: str | None
    api_key_file: Path | None
    ca_file: Path | None
    verbose: bool


class UsageError(Exception):
    """The command line, or a setting, cannot be used; the message says what to do."""


@contextmanager
def connected(context: typer.Context) -> Iterator["Client"]:
    """Give a client to a command, and turn whatever fails into one line on stderr and an exit status."""
    settings = context.find_object(Settings)
    assert settings is not None, "the callback of the app sets it"
    try:
        # Late, since importing gRPC takes longer than everything else that starts.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from slackwater.blocking import Client

        if settings.address is None:
            raise UsageError("no coordinator given: set SLACKWATER_ADDRESS or pass --address HOST:PORT")
        key = read_api_key(settings.api_key_file)
        with Client(settings.address, api_key=key, ca_file=settings.ca_file) as client:
            yield client
            sys.stdout.flush()
    except (typer.Exit, typer.BadParameter):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of the pipe has left (`| head`); what is still buffered must not fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(ExitCode.PIPE_CLOSED) from None
    except Exception as error:
        if settings.verbose:
            traceback.print_exc()
        typer.echo(f"slackwater: {describe(error)}", err=True)
        raise typer.Exit(exit_code(error)) from error


def read_api_key(path: Path | None) -> str | None:
    """Return the key from its file, else from SLACKWATER_API_KEY, else None."""
    if path is None:
        return os.environ.get("SLACKWATER_API_KEY")
    try:
        mode = path.stat().st_mode
        key = path.read_text()
    except OSError as error:
        raise UsageError(f"API key file {path} cannot be read: {error.strerror}") from error
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        typer.echo(f"slackwater: warning: {path} can be read by others; run: chmod 600 {path}", err=True)
    return key


def write_secret(path: Path, secret: str) -> None:
    """Write a secret to a new file that only its owner can read; an existing file is left alone."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise UsageError(f"{path} exists; remove it or name another file") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")


def check_writable(path: Path | None) -> None:
    """Refuse a file for a secret before the secret exists, since it can be shown only once."""
    if path is not None and path.exists():
        raise UsageError(f"{path} exists; remove it or name another file")
    if path is not None and not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path.parent} is no directory that can be written to")


def describe(error: Exception) -> str:
    """Return one line: what happened, and what can be done."""
    if isinstance(error, errors.VerificationError):
        return f"the answer's statement does not hold: {error}"
    if isinstance(error, errors.SlackwaterError):
        where = f"{error.param}: " if error.param and error.param not in error.message else ""
        again = "" if error.retry_after_s is None else f" (try again in {error.retry_after_s:g} s)"
        return f"{where}{error.message}{again}"
    if isinstance(error, UsageError):
        return str(error)
    return f"unexpected {type(error).__name__}: {error} (--verbose before the command shows where)"


def exit_code(error: Exception) -> ExitCode:
    """Return the status that tells a script who must act."""
    match error:
        case UsageError():
            return ExitCode.USAGE
        case errors.CallerError():
            return ExitCode.CALLER
        case errors.RetryableError():
            return ExitCode.RETRY
        case errors.OperatorError():
            return ExitCode.OPERATOR
        case errors.VerificationError():
            return ExitCode.UNVERIFIED
        case _:
            return ExitCode.UNEXPECTED
