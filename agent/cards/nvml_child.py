"""The process that talks to NVML, watched by `agent.cards.hardware`. One request line in, frames out.

A request is one line of JSON, either of:

  {"skipped": [indexes], "asleep": [PCI addresses], "marker": text}    list the cards
  {"set_power_limit": LimitRequest}

The answer is a run of frames, each a tag byte, a length (4 bytes, big-endian)
and so many bytes of payload:

  B  index as text         this card is touched next: whoever watches knows which one crashed or hung
  G  a Gpu message         its readings
  D  CardDetails           what this machine alone needs to know of the same card; none where it cannot be opened
  E  number of cards       the end of a listing
  S  LimitOutcome          the answer to set_power_limit
  N  {"note", "lasting"}   instead of an answer: why there is none

It ends when its input does, and with its parent.
"""

import importlib
import json
import os
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from agent.cards.details import LimitRequest
from agent.cards.nvml import Nvml
from agent.cards.nvml_processes import KERNEL, Kernel
from agent.cards.nvml_query import Unavailable
from agent.engines.engine_exec import die_with_parent

HEADER = struct.Struct(">cI")

TOUCHING = b"B"
CARD = b"G"
DETAILS = b"D"
END = b"E"
LIMIT = b"S"
NOTE = b"N"


def serve(module: Any, requests: BinaryIO, answers: BinaryIO, kernel: Kernel = KERNEL) -> None:
    """Answer requests with what `module` (`pynvml` or a fake of it) says, until the input ends."""
    nvml: Nvml | None = None
    for line in requests:
        request = json.loads(line)
        try:
            nvml = nvml or Nvml(module, kernel)
            if "set_power_limit" in request:
                outcome = nvml.set_power_limit(msgspec.convert(request["set_power_limit"], LimitRequest))
                _write(answers, LIMIT, msgspec.json.encode(outcome))
            else:
                _list_cards(nvml, request, answers)
        except Unavailable as reason:
            _write(answers, NOTE, json.dumps({"note": reason.note, "lasting": reason.lasting}).encode())
        answers.flush()


def _list_cards(nvml: Nvml, request: dict[str, Any], answers: BinaryIO) -> None:
    skipped, asleep = frozenset(request["skipped"]), frozenset(request["asleep"])
    count = nvml.count()
    for index in range(count):
        if index in skipped:
            continue
        _write(answers, TOUCHING, str(index).encode())
        # Before the call that may never return.
        answers.flush()
        card, details = nvml.read_card(index, asleep, request["marker"])
        _write(answers, CARD, card.SerializeToString())
        if details is not None:
            _write(answers, DETAILS, msgspec.json.encode(details))
    _write(answers, END, str(count).encode())


def _write(answers: BinaryIO, tag: bytes, payload: bytes) -> None:
    answers.write(HEADER.pack(tag, len(payload)) + payload)


def run(module: Any, parent_pid: int, kernel: Kernel = KERNEL) -> None:
    """Serve on standard input and output until the input ends."""
    die_with_parent(parent_pid)
    # Whatever a native library prints must not get between the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(module, sys.stdin.buffer, answers, kernel)


if __name__ == "__main__":
    run(importlib.import_module("pynvml"), int(sys.argv[1]))
