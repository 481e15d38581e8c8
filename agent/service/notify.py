"""Telling systemd how the agent is: started, what it does, still alive, stopping.

The protocol of sd_notify(3): datagrams of `NAME=value` lines to the socket in
$NOTIFY_SOCKET. Without that variable nobody asked, and every call does nothing.
"""

import asyncio
import os
import socket
from collections.abc import Mapping
from typing import NoReturn

import structlog

# Half of what the unit allows between two signs of life, as sd_watchdog_enabled(3) advises.
_WATCHDOG_SHARE = 0.5

log = structlog.get_logger()


class Notifier:
    """Speaks to the service manager that started this process, if one did.

    Args:
        environment: where $NOTIFY_SOCKET, $WATCHDOG_USEC and $WATCHDOG_PID are looked for.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the abstract name space.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._complained = False
        meant = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_period_s = (
            int(environment["WATCHDOG_USEC"]) / 1e6 * _WATCHDOG_SHARE
            if self._address and meant and environment.get("WATCHDOG_USEC", "").isdecimal()
            else None
        )

    def ready(self, status: str) -> None:
        """Say that the start is over; `systemctl start` returns now."""
        self._send(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        """Say in one line what goes on; `systemctl status` shows it."""
        self._send(f"STATUS={_one_line(status)}")

    def stopping(self) -> None:
        """Say that the end has begun and no restart is wanted."""
        self._send("STOPPING=1")

    async def keep_alive(self) -> NoReturn:
        """Show for ever that the event loop turns; a process that stops showing it is restarted."""
        if self.watchdog_period_s is None:
            await asyncio.Event().wait()
        while True:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_period_s or 0)

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            # A manager that is busy must not hold up the event loop.
            sender.setblocking(False)
            try:
                sender.sendto(message.encode(), self._address)
            except OSError as error:
                if not self._complained:
                    log.warning("the service manager cannot be told", error=str(error))
                self._complained = True


def _one_line(text: str) -> str:
    return text.replace("\n", " ")
