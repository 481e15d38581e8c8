"""What became of every task of a run: columns of numbers, so that a million of them fit, and a hash over the stream."""

import hashlib
import math
import struct
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coordinator.planning.simulation.arrivals import Arrival
from inference.task import ServiceClass

CLASSES: Final = tuple(ServiceClass)
RUNNING: Final = ""
ANSWERED: Final = "answered"
_RECORD: Final = struct.Struct("<qqqq")


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at one moment."""

    at_ms: float
    lent_nodes: int
    running: int
    queued: int


class Outcome:
    """Columns by number of the task, from 0 in order of arrival. Times on the coordinator's clock, in milliseconds."""

    def __init__(self) -> None:
        self.submitted_ms = array("d")
        self.first_token_ms = array("d")
        self.ended_ms = array("d")
        self.prompt_tokens = array("i")
        self.answer_tokens = array("i")
        self.class_number = array("b")
        # By its number in `fates`.
        self.fate_number = array("b")
        self.fates: list[str] = [RUNNING, ANSWERED]
        self.attempts = array("i")
        # How attempts ended that did not finish.
        self.broken: Counter[str] = Counter()
        self.discarded_tokens = 0
        self.samples: list[Sample] = []
        self._hash = hashlib.sha256()

    def __len__(self) -> int:
        return len(self.submitted_ms)

    def submit(self, arrival: Arrival) -> int:
        """Add a task; return its number."""
        self.submitted_ms.append(arrival.at_ms)
        self.first_token_ms.append(math.nan)
        self.ended_ms.append(math.nan)
        self.prompt_tokens.append(arrival.prompt_tokens)
        self.answer_tokens.append(arrival.answer_tokens)
        self.class_number.append(CLASSES.index(arrival.service_class))
        self.fate_number.append(0)
        self.attempts.append(0)
        return len(self.submitted_ms) - 1

    def deliver(self, number: int, at_ms: float) -> None:
        """Note that ids were delivered; the first time it is the first token."""
        if self.first_token_ms[number] != self.first_token_ms[number]:
            self.first_token_ms[number] = at_ms

    def attempt_ended(self, number: int, at_ms: float, node: str, outcome: str, tokens: int) -> None:
        self.attempts[number] += 1
        if outcome != "finished":
            self.broken[outcome] += 1
        self._hash.update(f"{number} {node} {outcome}".encode())
        self._note(number, at_ms, tokens, -1)

    def discard(self, number: int, tokens: int) -> None:
        """Note that ids which nobody had read were thrown away."""
        self.first_token_ms[number] = math.nan
        self.discarded_tokens += tokens

    def end(self, number: int, at_ms: float, fate: str, tokens: int) -> None:
        """Note how a task ended: answered, or why it failed."""
        if fate not in self.fates:
            self.fates.append(fate)
        self.fate_number[number] = self.fates.index(fate)
        self.ended_ms[number] = at_ms
        self._note(number, at_ms, tokens, self.fate_number[number])

    def digest(self) -> str:
        """Return the hash over all ends of attempts and tasks so far, in order, with their times."""
        return self._hash.hexdigest()

    def _note(self, number: int, at_ms: float, tokens: int, fate: int) -> None:
        self._hash.update(_RECORD.pack(number, round(at_ms * 1000.0), tokens, fate))

    def table(self) -> "Columns":
        """Return the columns as they are now."""
        return Columns(
            submitted_ms=np.array(self.submitted_ms),
            first_token_ms=np.array(self.first_token_ms),
            ended_ms=np.array(self.ended_ms),
            prompt_tokens=np.array(self.prompt_tokens),
            answer_tokens=np.array(self.answer_tokens),
            class_number=np.array(self.class_number),
            fate_number=np.array(self.fate_number),
            attempts=np.array(self.attempts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """As in `Outcome`, for arithmetic."""

    submitted_ms: NDArray[np.float64]
    first_token_ms: NDArray[np.float64]
    ended_ms: NDArray[np.float64]
    prompt_tokens: NDArray[np.int32]
    answer_tokens: NDArray[np.int32]
    class_number: NDArray[np.int8]
    fate_number: NDArray[np.int8]
    attempts: NDArray[np.int32]

    @property
    def answered(self) -> NDArray[np.bool_]:
        """Which tasks were answered, whether in time or not."""
        answered: NDArray[np.bool_] = self.fate_number == 1
        return answered
