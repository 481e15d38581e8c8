"""Slackwater's client library: ask a fleet of lent graphics cards, and check what it signed.

    async with AsyncClient("coordinator:8443", api_key=key, ca_file="ca.pem") as client:
        print(await client.chat("Why is the sky blue?", model="smollm2-135m-instruct").text())

`Client` is the same without `await`. Errors say who must act: see
`slackwater.errors`. Names load at first use, so that the command line starts
without waiting for gRPC.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slackwater._protos.checkpoint import Checkpoint
    from slackwater.answer import Answer
    from slackwater.blocking import BlockingAnswer, Client
    from slackwater.client import AsyncClient
    from slackwater.errors import (
        CallerError,
        OperatorError,
        RetryableError,
        SlackwaterError,
        VerificationError,
    )
    from slackwater.events import (
        Accepted,
        AttemptBroken,
        AttemptStarted,
        ClassQuote,
        Completion,
        Decision,
        Delta,
        Event,
        Finished,
        Message,
        Model,
        Quote,
        Task,
        TaskOptions,
        Waiting,
    )
    from slackwater.fleet import ApiKey, CreatedApiKey, JoinString, LedgerAccount, LedgerEntry, Node, Owner
    from slackwater.receipts import Receipt, VerifiedEntry, verify_growth, verify_receipt
    from slackwater.verification import VerifiedStatement, verify_finished

_HOMES = {
    "Accepted": "events",
    "Answer": "answer",
    "ApiKey": "fleet",
    "AsyncClient": "client",
    "AttemptBroken": "events",
    "AttemptStarted": "events",
    "BlockingAnswer": "blocking",
    "CallerError": "errors",
    "Checkpoint": "_protos.checkpoint",
    "ClassQuote": "events",
    "Client": "blocking",
    "Completion": "events",
    "CreatedApiKey": "fleet",
    "Decision": "events",
    "Delta": "events",
    "Event": "events",
    "Finished": "events",
    "JoinString": "fleet",
    "LedgerAccount": "fleet",
    "LedgerEntry": "fleet",
    "Message": "events",
    "Model": "events",
    "Node": "fleet",
    "OperatorError": "errors",
    "Owner": "fleet",
    "Quote": "events",
    "Receipt": "receipts",
    "RetryableError": "errors",
    "SlackwaterError": "errors",
    "Task": "events",
    "TaskOptions": "events",
    "VerificationError": "errors",
    "VerifiedEntry": "receipts",
    "VerifiedStatement": "verification",
    "Waiting": "events",
    "verify_finished": "verification",
    "verify_growth": "receipts",
    "verify_receipt": "receipts",
}

__all__ = [
    "Accepted",
    "Answer",
    "ApiKey",
    "AsyncClient",
    "AttemptBroken",
    "AttemptStarted",
    "BlockingAnswer",
    "CallerError",
    "Checkpoint",
    "ClassQuote",
    "Client",
    "Completion",
    "CreatedApiKey",
    "Decision",
    "Delta",
    "Event",
    "Finished",
    "JoinString",
    "LedgerAccount",
    "LedgerEntry",
    "Message",
    "Model",
    "Node",
    "OperatorError",
    "Owner",
    "Quote",
    "Receipt",
    "RetryableError",
    "SlackwaterError",
    "Task",
    "TaskOptions",
    "VerificationError",
    "VerifiedEntry",
    "VerifiedStatement",
    "Waiting",
    "verify_finished",
    "verify_growth",
    "verify_receipt",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
