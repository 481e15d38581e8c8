"""The error tree: every reason of the wire has a kind, and the kind says who must act."""

import pytest
from slackwater import errors
from slackwater._protos.slackwater.common.v1 import error_pb2
from slackwater._task_messages import error_from_proto
from slackwater.testing import error_detail

from coordinator.errors import PRESENTATION, Actor, Reason

BRANCHES = {Actor.CALLER: errors.CallerError, Actor.OPERATOR: errors.OperatorError, Actor.RETRY: errors.RetryableError}


def every_kind(base: type[errors.SlackwaterError]) -> list[type[errors.SlackwaterError]]:
    return [kind for child in base.__subclasses__() for kind in (child, *every_kind(child))]


def test_every_reason_of_the_wire_has_a_row() -> None:
    names = {name.removeprefix("ERROR_REASON_") for name in error_pb2.ErrorReason.keys()}  # noqa: SIM118
    assert names - {"UNSPECIFIED"} == errors.ERROR_BY_REASON.keys()


# Mutation tried: QUEUE_FULL mapped to InvalidArgument.
@pytest.mark.parametrize("reason", Reason)
def test_a_reason_lies_in_the_branch_that_the_coordinator_names(reason: Reason) -> None:
    assert issubclass(errors.ERROR_BY_REASON[reason.name], BRANCHES[PRESENTATION[reason].actor])


def test_every_kind_is_in_the_tree_of_the_docstring_once() -> None:
    assert errors.__doc__ is not None
    for kind in every_kind(errors.SlackwaterError):
        lines = [line for line in errors.__doc__.splitlines() if f"── {kind.__name__}" in line]
        names = [line.split("── ")[1].split()[0] for line in lines]
        assert names.count(kind.__name__) == 1, kind.__name__


def test_every_kind_has_one_branch() -> None:
    branches = (errors.CallerError, errors.OperatorError, errors.RetryableError, errors.VerificationError)
    for kind in every_kind(errors.SlackwaterError):
        assert sum(issubclass(kind, branch) for branch in branches) == 1, kind


def test_a_detail_becomes_an_error_with_all_its_fields() -> None:
    detail = error_detail("QUEUE_FULL", "RETRY", "too many tasks wait", param="model", retry_after_ms=1500)
    error = error_from_proto(detail)
    assert type(error) is errors.QueueFull
    assert (str(error), error.reason, error.param, error.retry_after_s) == (
        "too many tasks wait",
        "QUEUE_FULL",
        "model",
        1.5,
    )


def test_a_detail_without_param_and_time_says_so() -> None:
    error = error_from_proto(error_detail("INTERNAL", "OPERATOR"))
    assert (error.param, error.retry_after_s) == (None, None)


@pytest.mark.parametrize(
    ("actor", "kind"),
    [(1, errors.CallerError), (2, errors.OperatorError), (3, errors.RetryableError), (99, errors.OperatorError)],
)
def test_a_reason_of_a_newer_coordinator_falls_back_to_its_actor(
    actor: int, kind: type[errors.SlackwaterError]
) -> None:
    detail = error_pb2.ErrorDetail.FromString(
        error_pb2.ErrorDetail(message="new").SerializeToString() + bytes([0x08, 77, 0x28, actor])
    )
    error = error_from_proto(detail)
    assert type(error) is kind
    assert error.reason == "UNKNOWN_77"
