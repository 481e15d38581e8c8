"""What a fake engine does wrong on demand. Pure."""

from typing import Annotated, Final, Literal

import msgspec


class Fault(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """One thing to do wrong, to the streams it matches, once each has sent `after_tokens` ids.

    stall: send nothing more · crash: end the process · slow: `factor` times slower · truncate: claim "length" too
    early · lie_finish: claim "stop" after an ordinary id · lie_count: send more ids than were asked for ·
    wrong_ids: send other ids than the hash says · error: an error event · cut: break the connection ·
    stop: send an end-of-text id · long_prefill: `seconds` more before the first id.
    """

    kind: Literal[
        "stall",
        "crash",
        "slow",
        "truncate",
        "lie_finish",
        "lie_count",
        "wrong_ids",
        "error",
        "cut",
        "stop",
        "long_prefill",
    ]
    after_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    # Only streams whose request id contains this.
    request_id: str = ""
    # How many streams it hits; None hits all, also those to come.
    streams: Annotated[int, msgspec.Meta(ge=1)] | None = None
    factor: Annotated[int, msgspec.Meta(ge=2)] = 10
    seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


# Faults of the pace have no first id to act on.
FROM_THE_START: Final = ("slow", "long_prefill")
