"""Keeps the node's certificate fresh: by certificate while it holds, by its signing key where that came too late."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import grpc
import structlog
from cryptography import x509

from agent import events as e
from agent.connection import Connector
from agent.enrolment import renew_by_certificate, renew_by_key
from agent.errors import EnrolmentRefused, NodeBanned
from agent.identity import Identity, store_identity

# Certificates live for days.
CERTIFICATE_PERIOD_S = 30.0
# At two thirds of its life (SPIRE, Let's Encrypt): a third is left for a coordinator that is down.
RENEW_AT_SHARE = 2 / 3
# The channel under the old certificate is given up then at the latest, work or not.
ROLL_OVER_BEFORE_MS = 10 * 60_000
# Failures to connect after which the reason may be a certificate that only the coordinator's clock finds expired.
SUSPECT_AFTER_FAILURES = 3
# And again after each so many: with the backoff at its ceiling about once a minute.
SUSPECT_EVERY_FAILURES = 8

log = structlog.get_logger()


class CertificateKeeper:
    """Owns the identity of a running agent.

    Args:
        now_ms: the coordinator's time, or this machine's while that was never heard.
        feed: is told where the coordinator has banned this node.
    """

    def __init__(
        self, identity: Identity, state_dir: Path, *, now_ms: Callable[[], int], feed: Callable[[e.Event], None]
    ) -> None:
        self.identity = identity
        self._state_dir = state_dir
        self._now_ms = now_ms
        self._feed = feed
        # Expiry of the certificate that the present channel was opened with, while a newer one waits to be used.
        self._roll_over_by_ms: int | None = None

    async def run(self, connector: Connector, busy: Callable[[], bool]) -> NoReturn:
        """Renew over the connection when it is time, and change to a channel under the new certificate."""
        while True:
            await asyncio.sleep(CERTIFICATE_PERIOD_S)
            now_ms = self._now_ms()
            channel = connector.channel
            if channel is None:
                continue
            try:
                if self.renewal_due(now_ms):
                    await self.renew(channel)
                if self.roll_over_due(now_ms, busy()):
                    await connector.roll_over()
                    self._roll_over_by_ms = None
            except NodeBanned as error:
                self._feed(e.ClosingReceived(e.ClosingReason.CLOSING_REASON_BANNED, str(error)))
            except (EnrolmentRefused, TimeoutError, OSError) as error:
                log.warning("certificate was not renewed", reason=str(error))

    def renewal_due(self, now_ms: int) -> bool:
        """Whether two thirds of the certificate's life are over."""
        begin_ms, end_ms = _validity_ms(self.identity.certificate())
        return now_ms >= begin_ms + (end_ms - begin_ms) * RENEW_AT_SHARE

    def roll_over_due(self, now_ms: int, busy: bool) -> bool:
        """Whether to change to a channel under the new certificate: between tasks, or before the old one ends."""
        if self._roll_over_by_ms is None:
            return False
        return not busy or now_ms >= self._roll_over_by_ms - ROLL_OVER_BEFORE_MS

    async def renew(self, channel: grpc.aio.Channel) -> None:
        """Get the next certificate over the present channel.

        Raises:
            EnrolmentRefused: the coordinator refuses or does not answer.
            NodeBanned: it has banned this node.
        """
        _, old_end_ms = _validity_ms(self.identity.certificate())
        await self._adopt(await renew_by_certificate(self.identity, channel))
        self._roll_over_by_ms = old_end_ms

    async def recover(self, failures: int) -> None:
        """After a failure to connect: renew by key if the certificate is to blame, or may be."""
        _, end_ms = _validity_ms(self.identity.certificate())
        if self._now_ms() < end_ms and failures % SUSPECT_EVERY_FAILURES != SUSPECT_AFTER_FAILURES:
            return
        try:
            await self._adopt(await renew_by_key(self.identity))
        except NodeBanned as error:
            self._feed(e.ClosingReceived(e.ClosingReason.CLOSING_REASON_BANNED, str(error)))
        except (EnrolmentRefused, OSError) as error:
            log.warning("certificate was not renewed", reason=str(error))

    async def _adopt(self, renewed: Identity) -> None:
        # On the disk first: a certificate that is used but not stored would be lost with the process.
        await asyncio.to_thread(store_identity, renewed, self._state_dir)
        self.identity = renewed
        log.info("certificate renewed", not_after=renewed.certificate().not_valid_after_utc.isoformat())


def _validity_ms(certificate: x509.Certificate) -> tuple[int, int]:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return int(begin.timestamp() * 1000), int(end.timestamp() * 1000)
