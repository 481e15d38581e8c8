"""What the ledger's settlement makes of each task that ends: sums of its transfers. The journal is not kept."""

from collections import Counter

from coordinator.ledger.prices import Terms
from coordinator.ledger.settlement import EndedTask, Reservation, settle
from inference.task import TaskId, TenantId

TENANT = TenantId("tenant")


class Settlements:
    """Micro-credits moved to and from each kind of account: `tenant`, `held`, `unsigned`, `platform:failover`, ...

    Attributes:
        asked_micro: what owners ask for all that their engines were given, whatever became of it: the prompt of each
            attempt, with what there was of the answer, and the ids that it delivered.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.asked_micro = 0
        self.sums_micro: Counter[str] = Counter()

    def settle(self, task_id: TaskId, model: str, max_tokens: int, ended: EndedTask) -> None:
        """Settle a task as the ledger does."""
        price = self._terms.price(model)
        reserved_micro = price.charge_micro(ended.prompt_tokens, max_tokens)
        reservation = Reservation(
            task_id=task_id,
            tenant_id=TENANT,
            amount_micro=reserved_micro,
            price=price,
            ask=self._terms.node_share(model),
        )
        for attempt in ended.attempts:
            ask = attempt.ask or reservation.ask
            read_tokens = ended.prompt_tokens + attempt.first_index
            self.asked_micro += ask.earned_micro(read_tokens, attempt.delivered_tokens)
        sums = self.sums_micro
        # What was set aside for it; its escrow is empty again after the transfers.
        sums["tenant"] -= reserved_micro
        sums["escrow"] += reserved_micro
        for transfer in settle(reservation, ended):
            for account, amount_micro in transfer.legs:
                sums[account if account.startswith("platform:") else account.partition(":")[0]] += amount_micro
