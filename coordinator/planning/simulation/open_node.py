"""A simulated node whose owner leaves the model to the fleet: it fetches what it is named, and changes to it.

As an agent does (agent/open_engines.py): the engine goes on while files come;
then it takes no new work, and changes once it has none, or after 30 s, when it
hands back what still runs. Files stay. They come also while the owner has the
card, whose return ends what the engine was loading; it is loaded when it is
lent again.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.fleet.placing import CHANGE_PATIENCE_S
from coordinator.planning.curves import EngineCurve
from coordinator.planning.simulation.node import Node, Tally, World
from coordinator.planning.simulation.scenario import Fleet
from inference.task import ManifestDigest


@dataclass(frozen=True, slots=True)
class Runnable:
    """A model that a node can run. Args: `size_bytes`: of its files."""

    curve: EngineCurve
    size_bytes: int


class OpenNode(Node):
    """Begins with the model of its fleet.

    Args:
        models: all that it can run, that one too.

    Attributes:
        stored: whose files lie on its disk, in the order in which they came.
    """

    __slots__ = ("_files_at_ms", "_ready_at_ms", "_switch_by_ms", "models", "stored", "wanted")

    def __init__(
        self,
        number: int,
        fleet: Fleet,
        models: Mapping[ManifestDigest, Runnable],
        delay_ms: float,
        tally: Tally,
        world: World,
    ) -> None:
        super().__init__(number, fleet, models[fleet.digest].curve, delay_ms, tally, world)
        self.models = models
        self.stored = [fleet.digest]
        self.wanted: ManifestDigest | None = None
        self._files_at_ms = math.inf
        # While the files of what is wanted are there and the engine has not changed; else infinite.
        self._switch_by_ms = math.inf
        # While the engine loads.
        self._ready_at_ms = 0.0

    @property
    def loading(self) -> bool:
        return self.lent and self._ready_at_ms > 0.0

    @property
    def ready(self) -> bool:
        return self.lent and not self.loading and self._switch_by_ms == math.inf

    def fetched_bytes(self, at_ms: float) -> int:
        """Return how much is there of the model that is wanted."""
        if self.wanted is None:
            return 0
        left_bytes = max(0.0, self._files_at_ms - at_ms) / 1000.0 * self.fleet.line_bytes_per_s
        return max(0, self.models[self.wanted].size_bytes - math.ceil(left_bytes))

    def want(self, digest: ManifestDigest, at_ms: float) -> None:
        """Take which model is wanted; said again it changes nothing."""
        if digest == self.wanted or digest not in self.models:
            return
        ready = self.ready
        self._leave_off()
        if digest != self.digest:
            self.wanted = digest
            self._files_at_ms = at_ms if digest in self.stored else at_ms + self._fetch_ms(digest)
            self._world.schedule(self._files_at_ms, self._fetched, digest, self._files_at_ms)
        if self.ready and not ready:
            self._report(at_ms)

    def _leave_off(self) -> None:
        self.wanted, self._files_at_ms, self._switch_by_ms = None, math.inf, math.inf

    def _fetch_ms(self, digest: ManifestDigest) -> float:
        return 1000.0 * self.models[digest].size_bytes / self.fleet.line_bytes_per_s

    def _fetched(self, digest: ManifestDigest, at_ms: float) -> None:
        if (self.wanted, self._files_at_ms) != (digest, at_ms):
            # Another one is wanted by now.
            return
        if digest not in self.stored:
            self.stored.append(digest)
            self._tally.fetched_bytes += self.models[digest].size_bytes
        self._switch_by_ms = at_ms + 1000.0 * CHANGE_PATIENCE_S
        if self._attempts:
            self._world.schedule(self._switch_by_ms, self._give_up_waiting, self._switch_by_ms)
            self._report(at_ms)
        else:
            self._change(at_ms)

    def _advance(self, at_ms: float) -> None:
        super()._advance(at_ms)
        if self._switch_by_ms < math.inf and not self._attempts:
            self._change(at_ms)

    def _give_up_waiting(self, at_ms: float) -> None:
        if at_ms == self._switch_by_ms:
            self._change(at_ms)

    def _change(self, at_ms: float) -> None:
        assert self.wanted is not None, "an engine changes to what is wanted"
        # As an agent that hands back: drained.
        self._hand_back("drained", at_ms)
        self._stop_engine(at_ms)
        self.digest, self.curve = self.wanted, self.models[self.wanted].curve
        self._leave_off()
        self._tally.model_changes += 1
        if self.lent:
            self._ready_at_ms = at_ms + 1000.0 * self.fleet.owners.reload_s
            self._world.schedule(self._ready_at_ms, self._loaded, self._ready_at_ms)
        if self.connected:
            self._report(at_ms)

    def _loaded(self, at_ms: float) -> None:
        if at_ms == self._ready_at_ms:
            self._ready_at_ms = 0.0
            self._report(at_ms)

    def _lose(self, at_ms: float) -> None:
        super()._lose(at_ms)
        self._ready_at_ms = 0.0
        if self._switch_by_ms < math.inf:
            self._change(at_ms)
