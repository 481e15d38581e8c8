"""What the package exports, and that the blocking client keeps step with the asynchronous one."""

import inspect

import slackwater
from slackwater.answer import Answer
from slackwater.blocking import BlockingAnswer


def public_methods(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_all_lists_exactly_the_lazy_names_and_each_resolves() -> None:
    assert list(slackwater.__all__) == sorted(slackwater._HOMES)
    for name in slackwater.__all__:
        assert getattr(slackwater, name) is not None


def test_the_public_names_are_these() -> None:
    assert set(slackwater.__all__) == {
        *("Client", "AsyncClient", "Answer", "BlockingAnswer", "Completion"),
        *("Accepted", "AttemptStarted", "AttemptBroken", "Delta", "Finished", "Event", "Message", "TaskOptions"),
        *("Model", "Task", "Node", "Owner", "JoinString", "ApiKey", "CreatedApiKey"),
        *("SlackwaterError", "CallerError", "OperatorError", "RetryableError", "VerificationError"),
        *("VerifiedStatement", "verify_finished"),
        *("Quote", "ClassQuote", "Decision", "Waiting"),
        *("LedgerAccount", "LedgerEntry"),
        *("Receipt", "VerifiedEntry", "Checkpoint", "verify_receipt", "verify_growth"),
    }


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(slackwater, "Coordinator")


# Mutation tried: `ban` removed from Client.
def test_the_blocking_client_has_every_method_with_the_same_arguments() -> None:
    assert public_methods(slackwater.Client) == public_methods(slackwater.AsyncClient)
    for name in public_methods(slackwater.AsyncClient) - {"close"}:
        ours, theirs = getattr(slackwater.Client, name), getattr(slackwater.AsyncClient, name)
        assert inspect.signature(ours).parameters.keys() == inspect.signature(theirs).parameters.keys(), name
        assert ours.__doc__ == theirs.__doc__


def test_the_blocking_answer_offers_what_the_answer_does() -> None:
    assert public_methods(BlockingAnswer) ^ public_methods(Answer) == {"close", "aclose"}


def test_every_public_name_has_a_docstring() -> None:
    for name in slackwater.__all__:
        value = getattr(slackwater, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, name
