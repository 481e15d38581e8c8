"""Changes of the configuration file while the agent runs. A file that is not valid changes nothing."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import structlog

from agent.clock import until_next_s
from agent.config import LIVE_TABLES, AgentConfig, load_config
from agent.errors import ConfigInvalid

# An owner who saves the file looks at the effect a moment later; a stat a second costs nothing.
POLL_S = 1.0

log = structlog.get_logger()


class ConfigWatch:
    """Reads the file again whenever it is another one than before.

    Args:
        on_change: called from the event loop with the new configuration and the tables in it that act at once and say
            something else than before.
    """

    def __init__(
        self, path: Path, config: AgentConfig, on_change: Callable[[AgentConfig, frozenset[str]], None]
    ) -> None:
        self._path = path
        self._config = config
        self._on_change = on_change
        # Before it was read, so that a change in between is seen.
        self._seen = self._stamp()

    async def run(self) -> NoReturn:
        while True:
            await asyncio.sleep(until_next_s(POLL_S))
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp
                await self._read()

    async def _read(self) -> None:
        try:
            config = await asyncio.to_thread(load_config, self._path)
        except ConfigInvalid as error:
            log.error("the changed configuration is not valid; the old one stays in force", reason=str(error))
            return
        before, self._config = self._config, config
        changed = {name for name in AgentConfig.__struct_fields__ if getattr(before, name) != getattr(config, name)}
        at_once = frozenset(changed & LIVE_TABLES)
        if changed:
            log.info(
                "the configuration changed",
                at_once=sorted(at_once),
                at_the_next_start=sorted(changed - LIVE_TABLES),
            )
        if at_once:
            self._on_change(config, at_once)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = os.stat(self._path)
        except OSError:
            # Editors replace files; one that stays away changes nothing either.
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size
