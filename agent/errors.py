"""Every way in which the agent fails, and the exit status of each.

Each class says who must act. The command line prints the message as one line
and leaves with `exit_status`; a traceback means a bug of ours.

  0  stopped as asked                       5  a newer agent uses this identity
  1  a bug: see the traceback               6  the coordinator banned this node
  2  wrong configuration or command line    7  the coordinator speaks another protocol version
  3  the join string was refused            8  no engine can run: every model was refused
  4  this machine has not joined            9  `status`: no agent is running
                                           10  the disk is full or broken
                                           11  `pause`, ...: the running agent did not follow
                                           12  the coordinator's ledger does not hold
"""

from enum import IntEnum

from protos.slackwater.node.v1 import node_service_pb2

RefusalReason = node_service_pb2.RefusalReason


class ExitStatus(IntEnum):
    STOPPED = 0
    CONFIG_INVALID = 2
    ENROLMENT_REFUSED = 3
    NOT_JOINED = 4
    SUPERSEDED = 5
    BANNED = 6
    VERSION_UNSUPPORTED = 7
    NO_ENGINE = 8
    NOT_RUNNING = 9
    DISK_FAILED = 10
    NOT_CONFIRMED = 11
    LEDGER_DISPUTED = 12


class AgentError(Exception):
    """Base of what the agent reports in one line."""

    exit_status: ExitStatus = ExitStatus.CONFIG_INVALID


class ConfigInvalid(AgentError):
    """The operator must change the configuration file or the command line."""

    exit_status = ExitStatus.CONFIG_INVALID


class EnrolmentRefused(AgentError):
    """The operator needs another join string, or the coordinator is not who the join string says."""

    exit_status = ExitStatus.ENROLMENT_REFUSED


class NotJoined(AgentError):
    """The operator must run `slackwater-agent join` first."""

    exit_status = ExitStatus.NOT_JOINED


class NodeBanned(AgentError):
    """The operator must talk to the operator of the coordinator."""

    exit_status = ExitStatus.BANNED


class NoEngine(AgentError):
    """The operator must repair the models, or install an engine that runs them here: none of them may be loaded."""

    exit_status = ExitStatus.NO_ENGINE


class NotRunning(AgentError):
    """No agent runs on this state directory."""

    exit_status = ExitStatus.NOT_RUNNING


class NothingTold(NotRunning):
    """An agent runs on this state directory, or starts, and what it tells of itself cannot be read now."""


class DiskFailed(AgentError):
    """The operator must free some space, or repair the disk."""

    exit_status = ExitStatus.DISK_FAILED


class NotConfirmed(AgentError):
    """The owner's wish is written down, and the agent that runs did not follow in time: look at its log."""

    exit_status = ExitStatus.NOT_CONFIRMED


class LedgerDisputed(AgentError):
    """What the coordinator shows of its ledger is not what its signatures say: keep it, and ask its operator."""

    exit_status = ExitStatus.LEDGER_DISPUTED


class ModelRefused(AgentError):
    """The operator must repair one model directory; the other engines go on."""


class AssignmentInvalid(Exception):
    """The coordinator must choose another node, or whoever forged this must give up."""

    def __init__(self, reason: "RefusalReason.ValueType", detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
