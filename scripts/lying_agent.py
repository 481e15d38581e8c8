"""The agent with a lie in what it signs, for tests: engine, model and answers stay honest.

    lying_agent.py LIE CONFIG run --config ...

lies as the agent whose configuration file has the name CONFIG, and is honest as any other.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent import daemon, statements
from agent.__main__ import main
from agent.events import Command, EmbeddingComputed, ScoresComputed, SignStatement
from agent.workload import Workload
from protos import signing
from protos.slackwater.common.v1 import envelope_pb2, statement_pb2

# What is stated beyond what was delivered.
TOKENS_MORE: Final = 10

Lie = Callable[[statement_pb2.ResultStatement, Ed25519PrivateKey], envelope_pb2.SignedEnvelope]


def seal(statement: statement_pb2.ResultStatement, key: Ed25519PrivateKey) -> envelope_pb2.SignedEnvelope:
    return signing.seal(signing.RESULT_TYPE, statement.SerializeToString(), key)


def over_report(statement: statement_pb2.ResultStatement, key: Ed25519PrivateKey) -> envelope_pb2.SignedEnvelope:
    statement.completion_tokens += TOKENS_MORE
    return seal(statement, key)


def forge(statement: statement_pb2.ResultStatement, _: Ed25519PrivateKey) -> envelope_pb2.SignedEnvelope:
    """Sign as somebody else would who does not have the node's key."""
    return seal(statement, Ed25519PrivateKey.generate())


def from_a_stale_lease() -> Lie:
    """Answer every order under the first one, whose lease is long over."""
    first: list[bytes] = []

    def lie(statement: statement_pb2.ResultStatement, key: Ed25519PrivateKey) -> envelope_pb2.SignedEnvelope:
        first.append(statement.header_sha256)
        statement.header_sha256 = first[0]
        return seal(statement, key)

    return lie


def say_nothing_of_scores() -> None:
    """Send and sign no numbers where some were asked for."""
    honest = Workload.computed

    def computed(self: Workload, event: EmbeddingComputed | ScoresComputed, now: float) -> list[Command]:
        return honest(self, replace(event, scores=()) if isinstance(event, ScoresComputed) else event, now)

    Workload.computed = computed  # type: ignore[method-assign]  # That is the cheat.


LIES: Final[dict[str, Callable[[], Lie]]] = {
    "over-reported": lambda: over_report,
    "forged-envelope": lambda: forge,
    "stale-lease": from_a_stale_lease,
}


def begin(lie: Lie) -> None:
    def lying(command: SignStatement, node_id: str, key: Ed25519PrivateKey) -> envelope_pb2.SignedEnvelope:
        envelope = statements.sign_statement(command, node_id, key)
        return lie(statement_pb2.ResultStatement.FromString(envelope.payload), key)

    daemon.sign_statement = lying  # type: ignore[attr-defined]  # That is the cheat.


if __name__ == "__main__":
    name, config = sys.argv[1:3]
    sys.argv[1:3] = []
    if any(Path(argument).name == config for argument in sys.argv):
        say_nothing_of_scores() if name == "empty-scores" else begin(LIES[name]())
    main()
