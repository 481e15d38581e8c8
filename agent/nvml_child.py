"""The process that talks to NVML, watched by `agent.hardware`. One request line in, frames out.

A request is one line of JSON: {"skipped": [indexes], "asleep": [PCI addresses]}.
The answer is a run of frames, each a tag byte, a length (4 bytes, big-endian)
and so many bytes of payload:

  B  index as text         this card is touched next: whoever watches knows which one crashed or hung
  G  a Gpu message         its readings
  E  number of cards       the end of a listing
  N  {"note", "lasting"}   instead of a listing: why there is none

It ends when its input does, and with its parent.
"""

import importlib
import json
import os
import struct
import sys
from typing import Any, BinaryIO

from agent.engine_exec import die_with_parent
from agent.nvml import Nvml, Unavailable

HEADER = struct.Struct(">cI")

TOUCHING = b"B"
CARD = b"G"
END = b"E"
NOTE = b"N"


def serve(module: Any, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests with what `module` (`pynvml` or a fake of it) says, until the input ends."""
    nvml: Nvml | None = None
    for line in requests:
        request = json.loads(line)
        try:
            nvml = nvml or Nvml(module)
            _list_cards(nvml, frozenset(request["skipped"]), frozenset(request["asleep"]), answers)
        except Unavailable as reason:
            _write(answers, NOTE, json.dumps({"note": reason.note, "lasting": reason.lasting}).encode())
        answers.flush()


def _list_cards(nvml: Nvml, skipped: frozenset[int], asleep: frozenset[str], answers: BinaryIO) -> None:
    count = nvml.count()
    for index in range(count):
        if index in skipped:
            continue
        _write(answers, TOUCHING, str(index).encode())
        # Before the call that may never return.
        answers.flush()
        _write(answers, CARD, nvml.read_card(index, asleep).SerializeToString())
    _write(answers, END, str(count).encode())


def _write(answers: BinaryIO, tag: bytes, payload: bytes) -> None:
    answers.write(HEADER.pack(tag, len(payload)) + payload)


def run(module: Any, parent_pid: int) -> None:
    """Serve on standard input and output until the input ends."""
    die_with_parent(parent_pid)
    # Whatever a native library prints must not get between the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(module, sys.stdin.buffer, answers)


if __name__ == "__main__":
    run(importlib.import_module("pynvml"), int(sys.argv[1]))
