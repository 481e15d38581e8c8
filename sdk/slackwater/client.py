"""The asynchronous client: everything a coordinator's public port offers."""

from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from google.protobuf.message import DecodeError

from slackwater import errors
from slackwater._fleet_messages import api_key_from_proto, node_from_proto, owner_from_proto
from slackwater._protos.checkpoint import Checkpoint
from slackwater._protos.slackwater.common.v1 import envelope_pb2
from slackwater._protos.slackwater.fleet.v1 import fleet_service_pb2
from slackwater._protos.slackwater.task.v1 import task_service_pb2
from slackwater._task_messages import (
    Turn,
    chat_request,
    completion_request,
    model_from_proto,
    quote_from_proto,
    quote_request,
    task_from_proto,
)
from slackwater._transcript import REATTACH_WINDOW_S
from slackwater._transport import Transport
from slackwater.answer import Answer
from slackwater.events import Model, Quote, Task, TaskOptions
from slackwater.fleet import ApiKey, CreatedApiKey, JoinString, LedgerAccount, LedgerEntry, Node, Owner
from slackwater.receipts import Receipt, receipt_from_proto, verify_growth

# A listing or an administrative call is one database query; one that takes longer will not come.
CALL_TIMEOUT_S = 30.0


class AsyncClient:
    """A connection to one coordinator. Opened at the first call, closed by `close` or `async with`.

    Args:
        address: "host:port" of the coordinator's public gRPC port.
        api_key: a tenant's key, or an administrator's for what runs the fleet.
        ca_file: the fleet's CA certificate (PEM), as a path or as bytes; None trusts the system's CAs.
        timeout_s: for calls that are no stream.
        reattach_window_s: how long an answer that lost its stream tries to attach again without progress.

    Raises:
        CallerError: an argument cannot be used; `param` names it.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        ca_file: str | Path | bytes | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        reattach_window_s: float = REATTACH_WINDOW_S,
    ) -> None:
        self._transport = Transport(address, api_key=api_key, ca=ca_file, timeout_s=timeout_s)
        self._reattach_window_s = reattach_window_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; tasks that still run go on until the coordinator's detach grace is over."""
        await self._transport.close()

    def chat(self, messages: str | Sequence[Turn], *, model: str, **options: Unpack[TaskOptions]) -> Answer:
        """Ask for the next turn of a chat. Nothing is sent before the answer is first used.

        Args:
            messages: turns (`Message`, or mappings with role and content), or the text of one user turn.
            model: a name that `models()` lists.
            options: see `TaskOptions`; what is left out takes the model's neutral default.

        Raises:
            InvalidArgument: a value does not fit its type; ranges are judged by the coordinator.
        """
        return self._submit(chat_request(model, messages, options))

    def complete(self, prompt: str | Sequence[int], *, model: str, **options: Unpack[TaskOptions]) -> Answer:
        """Continue a text or a row of token ids, without a chat template; otherwise as `chat`."""
        return self._submit(completion_request(model, prompt, options))

    async def quote(
        self,
        messages: str | Sequence[Turn] | None = None,
        *,
        model: str,
        prompt: str | Sequence[int] | None = None,
        prompt_tokens: int | None = None,
        **options: Unpack[TaskOptions],
    ) -> Quote:
        """Ask what would become of a task in each service class, and what it would cost; nothing is submitted.

        Args:
            messages: as for `chat`.
            prompt: as for `complete`, in place of messages.
            prompt_tokens: how long a prompt is, in place of either.
            options: as for `chat`; the service class and max_price_micro are not looked at.
        """
        request = quote_request(model, messages, prompt, prompt_tokens, options)
        return quote_from_proto(await self._transport.call(self._transport.tasks.Quote, request))

    def attach(self, task_id: str, *, from_index: int = 0) -> Answer:
        """Read the answer of a task that runs, or ended a short while ago.

        Args:
            from_index: how many ids were read before; a place at which a delta ended, since text cannot be cut
                at any other.
        """
        if not task_id or from_index < 0:
            param = "from_index" if task_id else "task_id"
            raise errors.InvalidArgument("task_id is required, and from_index is 0 or more", param=param)
        return Answer(
            self._transport, task_id=task_id, from_index=from_index, reattach_window_s=self._reattach_window_s
        )

    async def cancel(self, task_id: str) -> None:
        """End a task, down to the engine."""
        request = task_service_pb2.CancelTaskRequest(task_id=task_id)
        await self._transport.call(self._transport.tasks.CancelTask, request)

    async def get_task(self, task_id: str) -> Task:
        """Tell how a task stands, with the coordinator's record of each attempt."""
        request = task_service_pb2.GetTaskRequest(task_id=task_id)
        return task_from_proto(await self._transport.call(self._transport.tasks.GetTask, request))

    async def receipts(self, task_id: str) -> list[Receipt]:
        """Return what the ledger holds about a task of this key, each entry with its proof; see `verify_receipt`.

        Raises:
            TaskNotFound: the ledger has nothing about it, or not yet.
        """
        request = task_service_pb2.GetReceiptRequest(task_id=task_id)
        response = await self._transport.call(self._transport.tasks.GetReceipt, request)
        return [receipt_from_proto(receipt) for receipt in response.receipts]

    async def checkpoint(self, seen: Checkpoint | None, *, coordinator_public_keys: Iterable[bytes]) -> Checkpoint:
        """Fetch the newest checkpoint of the ledger and check that it extends `seen`; keep what is returned.

        Args:
            seen: as for `verify_growth`.

        Raises:
            VerificationError: as `verify_growth`.
        """
        note, proof = await self.checkpoint_note(0 if seen is None else seen.size)
        return verify_growth(seen, note, proof, coordinator_public_keys=coordinator_public_keys)

    async def checkpoint_note(self, old_size: int) -> tuple[bytes, tuple[bytes, ...]]:
        """Fetch the newest checkpoint as a signed note, with the proof from a log of `old_size` entries; unchecked.

        For whoever keeps the note itself, which is evidence; see `verify_growth`.
        """
        request = task_service_pb2.GetCheckpointRequest(old_size=old_size)
        update = (await self._transport.call(self._transport.tasks.GetCheckpoint, request)).update
        return update.checkpoint, tuple(update.consistency_proof)

    async def models(self) -> list[Model]:
        """List the models that can be asked for."""
        response = await self._transport.call(self._transport.tasks.ListModels, task_service_pb2.ListModelsRequest())
        return [model_from_proto(model) for model in response.models]

    async def nodes(self) -> list[Node]:
        """List the nodes of the fleet. What a node says of itself is self-reported."""
        response = await self._transport.call(self._transport.fleet.ListNodes, fleet_service_pb2.ListNodesRequest())
        return [node_from_proto(node) for node in response.nodes]

    async def watch_nodes(self) -> AsyncIterator[Node]:
        """Yield every node, then each change, until the connection is lost."""
        call = self._transport.stream(self._transport.fleet.WatchNodes, fleet_service_pb2.WatchNodesRequest())
        try:
            while (response := await self._transport.read(call)) is not None:
                yield node_from_proto(response.node)
        finally:
            call.cancel()
        raise errors.CoordinatorUnavailable(f"{self._transport.address}: the coordinator ended the stream of nodes")

    async def create_owner(self, name: str, *, trusted: bool = False) -> Owner:
        """Register an owner of nodes; a trusted one may serve tasks of the privacy class "trusted_owners"."""
        request = fleet_service_pb2.CreateOwnerRequest(name=name, trusted=trusted)
        return owner_from_proto((await self._transport.call(self._transport.fleet.CreateOwner, request)).owner)

    async def owners(self) -> list[Owner]:
        """List the owners."""
        response = await self._transport.call(self._transport.fleet.ListOwners, fleet_service_pb2.ListOwnersRequest())
        return [owner_from_proto(owner) for owner in response.owners]

    async def create_join_string(self, owner: str, *, lifetime_s: int | None = None) -> JoinString:
        """Make a join string for one machine of an owner (name or id); at most an hour, which is the default."""
        request = fleet_service_pb2.CreateJoinStringRequest(owner=owner, lifetime_s=lifetime_s or 0)
        response = await self._transport.call(self._transport.fleet.CreateJoinString, request)
        return JoinString(
            join_string=response.join_string, token_id=response.token_id, expires_at_ms=response.expires_at_ms
        )

    async def drain(self, node_id: str) -> Node:
        """Give a node no more work and move what it runs."""
        request = fleet_service_pb2.DrainNodeRequest(node_id=node_id)
        return node_from_proto((await self._transport.call(self._transport.fleet.DrainNode, request)).node)

    async def resume(self, node_id: str) -> Node:
        """End a drain."""
        request = fleet_service_pb2.ResumeNodeRequest(node_id=node_id)
        return node_from_proto((await self._transport.call(self._transport.fleet.ResumeNode, request)).node)

    async def ban(self, node_id: str, *, reason: str) -> Node:
        """Shut a node out, from its next message on; its owner is shown the reason."""
        request = fleet_service_pb2.BanNodeRequest(node_id=node_id, reason=reason)
        return node_from_proto((await self._transport.call(self._transport.fleet.BanNode, request)).node)

    async def release(self, verdict_id: str, *, reason: str) -> str:
        """Take a quarantine or a watch back; return the id of the verdict that says so, which its owner is shown.

        Args:
            verdict_id: the verdict in force on a node, as `slackwater-coordinator verdicts list` shows it.
        """
        request = fleet_service_pb2.ReleaseVerdictRequest(verdict_id=verdict_id, reason=reason)
        response = await self._transport.call(self._transport.fleet.ReleaseVerdict, request)
        return response.verdict.verdict_id

    async def set_verification_mode(self, rule: str, *, shadow: bool) -> list[str]:
        """Let a rule of verification only look on, or count again; return all rules that only look on.

        Args:
            rule: a kind of audit ("canary", "rescore", "structure"...), or a hard rule of one ("rescore.false_stop").
        """
        mode = fleet_service_pb2.VERIFICATION_MODE_SHADOW if shadow else fleet_service_pb2.VERIFICATION_MODE_ACTIVE
        request = fleet_service_pb2.SetVerificationModeRequest(rule=rule, mode=mode)
        response = await self._transport.call(self._transport.fleet.SetVerificationMode, request)
        return list(response.shadow_rules)

    async def create_api_key(self, name: str, *, role: str = "tenant") -> CreatedApiKey:
        """Make an API key with the role "tenant" or "admin"; its secret is shown this once."""
        request = fleet_service_pb2.CreateApiKeyRequest(name=name, role=role)
        response = await self._transport.call(self._transport.fleet.CreateApiKey, request)
        return CreatedApiKey(key=api_key_from_proto(response.key), secret=response.secret)

    async def api_keys(self) -> list[ApiKey]:
        """List the API keys, without secrets."""
        response = await self._transport.call(self._transport.fleet.ListApiKeys, fleet_service_pb2.ListApiKeysRequest())
        return [api_key_from_proto(key) for key in response.keys]

    async def grant_credit(self, tenant_id: str, amount_micro: int, *, grant_id: str) -> int:
        """Give a tenant (the id of its API key) credit; return what it may spend now, in micro-credits.

        Args:
            grant_id: your own for this grant; sent again with the same id, it is given once.
        """
        request = fleet_service_pb2.GrantCreditRequest(
            tenant_id=tenant_id, amount_micro=amount_micro, grant_id=grant_id
        )
        return (await self._transport.call(self._transport.fleet.GrantCredit, request)).balance_micro

    async def ledger_accounts(self) -> list[LedgerAccount]:
        """List balances of the ledger: all of them with an admin key, your own with another."""
        request = fleet_service_pb2.ListAccountsRequest()
        response = await self._transport.call(self._transport.fleet.ListAccounts, request)
        return [LedgerAccount(account=one.account, balance_micro=one.balance_micro) for one in response.accounts]

    async def ledger_entries(self, from_sequence: int = 0) -> list[LedgerEntry]:
        """Return a page of the ledger's journal from this number on, of your own entries; none after the last.

        With an admin key, of all entries.
        """
        request = fleet_service_pb2.ListEntriesRequest(from_sequence=from_sequence)
        response = await self._transport.call(self._transport.fleet.ListEntries, request)
        return [LedgerEntry(sequence=one.sequence, entry=one.entry) for one in response.entries]

    async def revoke_api_key(self, key_id: str) -> ApiKey:
        """End an API key."""
        request = fleet_service_pb2.RevokeApiKeyRequest(key_id=key_id)
        return api_key_from_proto((await self._transport.call(self._transport.fleet.RevokeApiKey, request)).key)

    async def register_model(self, manifest: bytes, *, tokenizer_directory: str | Path) -> str:
        """Make a signed model known to the coordinator; returns the manifest's digest.

        Args:
            manifest: the serialised envelope, as the model builder wrote it.
            tokenizer_directory: on the coordinator's machine.
        """
        try:
            envelope = envelope_pb2.SignedEnvelope.FromString(manifest)
        except DecodeError as error:
            raise errors.InvalidArgument("manifest is no signed envelope", param="manifest") from error
        request = fleet_service_pb2.RegisterModelRequest(
            manifest=envelope, tokenizer_directory=str(tokenizer_directory)
        )
        return (await self._transport.call(self._transport.fleet.RegisterModel, request)).manifest_digest

    def _submit(self, request: task_service_pb2.SubmitTaskRequest) -> Answer:
        return Answer(self._transport, submission=request, reattach_window_s=self._reattach_window_s)
