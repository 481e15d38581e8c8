"""Finished results until the coordinator has taken them. Pure.

A result may be finished while the coordinator is away, or be lost on its way
to it. Either way it is sent again, over the next stream or after a while, for
as long as this agent runs: the statement that it signed, with the order that
it answers, from which even a coordinator that was started anew can see what
it once ordered.
"""

from collections import OrderedDict
from dataclasses import replace

from agent import events as e
from agent.assignments import AttemptKey, TaskOrder

# Results that wait for the coordinator's word, the newest of them: more than the largest node finishes
# before it hears that its stream is lost. One has 4 bytes for each id and a kilobyte; 64 MB at the very most.
RESULTS_KEPT_MAX = 1024
# An answer takes a round trip. One that did not come in this time will not.
SEND_AGAIN_S = 10.0


class KeptResults:
    """What was finished and not taken yet."""

    def __init__(self) -> None:
        # With the time when it was last sent, oldest first.
        self._kept: OrderedDict[AttemptKey, tuple[float, e.SendFinished]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, order: TaskOrder, finished: e.SendFinished, now: float) -> None:
        """Keep a result. Its embedding or scores go only once: whoever waited for them has them from elsewhere."""
        self._kept[order.key] = (now, replace(finished, embedding=(), scores=(), header=order.header))
        if len(self._kept) > RESULTS_KEPT_MAX:
            self._kept.popitem(last=False)

    def taken(self, key: AttemptKey) -> None:
        self._kept.pop(key, None)

    def again(self, now: float) -> list[e.Command]:
        """Return everything for a new stream, oldest first."""
        self._kept = OrderedDict((key, (now, finished)) for key, (_, finished) in self._kept.items())
        return [finished for _, finished in self._kept.values()]

    def overdue(self, now: float) -> list[e.Command]:
        """Return what was sent some time ago and not answered."""
        due: list[e.Command] = []
        while self._kept:
            key, (sent_at, finished) = next(iter(self._kept.items()))
            if now - sent_at < SEND_AGAIN_S:
                break
            self._kept[key] = (now, finished)
            self._kept.move_to_end(key)
            due.append(finished)
        return due
