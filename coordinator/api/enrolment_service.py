"""EnrolmentService: converts between the wire and the enrolment authority."""

import asyncio
from collections.abc import Sequence

from coordinator.api.identity import Context
from coordinator.enrolment.service import EnrolmentApplication, EnrolmentAuthority
from coordinator.fleet.registry import FleetRegistry
from coordinator.keys import CoordinatorKeys
from coordinator.store.port import Store
from inference.task import NodeId
from protos.slackwater.node.v1 import enrolment_service_pb2 as wire
from protos.slackwater.node.v1 import enrolment_service_pb2_grpc


class EnrolmentServicer(enrolment_service_pb2_grpc.EnrolmentServiceServicer):
    """`node_address` is the "host:port" of the node port, as agents reach it."""

    def __init__(
        self,
        authority: EnrolmentAuthority,
        registry: FleetRegistry,
        store: Store,
        keys: CoordinatorKeys,
        *,
        cluster_id: str,
        node_address: str,
        release_public_keys: Sequence[bytes],
        abuse_contact: str,
        content_policy: str,
    ) -> None:
        self._authority = authority
        self._registry = registry
        self._store = store
        self._keys = keys
        self._cluster_id = cluster_id
        self._node_address = node_address
        self._release_public_keys = tuple(release_public_keys)
        self._abuse_contact = abuse_contact
        self._content_policy = content_policy

    async def StartEnrolment(
        self, request: wire.StartEnrolmentRequest, context: Context
    ) -> wire.StartEnrolmentResponse:
        nonce = await asyncio.to_thread(self._authority.start_enrolment, request.token_id)
        return wire.StartEnrolmentResponse(
            server_nonce=nonce,
            cluster_id=self._cluster_id,
            abuse_contact=self._abuse_contact,
            content_policy=self._content_policy,
        )

    async def CompleteEnrolment(
        self, request: wire.CompleteEnrolmentRequest, context: Context
    ) -> wire.CompleteEnrolmentResponse:
        application = EnrolmentApplication(
            token_id=request.token_id,
            token_secret=request.token_secret,
            certificate_request=request.certificate_request,
            signing_public_key=request.signing_public_key,
            server_nonce=request.server_nonce,
            proof=request.proof,
            label=request.label,
        )
        enrolled = await asyncio.to_thread(self._authority.complete_enrolment, application)
        owner = await asyncio.to_thread(self._store.find_owner, enrolled.node.owner_id)
        assert owner is not None  # a foreign key
        self._registry.put_owner(owner)
        self._registry.put_node(enrolled.node)
        return wire.CompleteEnrolmentResponse(
            node_id=enrolled.node.node_id,
            certificate_chain=enrolled.certificate.chain,
            ca_certificate=self._keys.ca_pem.decode(),
            node_address=self._node_address,
            coordinator_public_keys=[self._keys.signing_public_key],
            release_public_keys=self._release_public_keys,
            cluster_id=self._cluster_id,
        )

    async def StartRenewal(self, request: wire.StartRenewalRequest, context: Context) -> wire.StartRenewalResponse:
        nonce = await asyncio.to_thread(self._authority.start_renewal, NodeId(request.node_id))
        return wire.StartRenewalResponse(server_nonce=nonce)

    async def CompleteRenewal(
        self, request: wire.CompleteRenewalRequest, context: Context
    ) -> wire.CompleteRenewalResponse:
        enrolled = await asyncio.to_thread(
            self._authority.complete_renewal,
            NodeId(request.node_id),
            request.certificate_request,
            request.server_nonce,
            request.proof,
        )
        self._registry.put_node(enrolled.node)
        return wire.CompleteRenewalResponse(certificate_chain=enrolled.certificate.chain)
