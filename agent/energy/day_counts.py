"""What this machine did today: tokens, tasks, joules, by model. Pure; `agent.energy.day_file` keeps it over restarts.

A day is the owner's local one. The owner's daily limit (`agent.owner.consent`) is held
against these counts, and `status` shows them.
"""

from collections import Counter
from datetime import date

import msgspec

from agent.energy.card import EnergyMethod
from agent.energy.meter import EnergyTotals, TaskEnergy
from agent.owner.consent import TOKENS_NOT_KNOWN

# A clock that is set back, or a traveller who crosses midnight westward, must not start a day's counts again; a clock
# that was far ahead by mistake must.
DAYS_BACK_MAX = 1


class ModelDay(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What one model did in a day.

    Args:
        tasks: attempts that ended here by themselves.
        prompt_tokens, completion_tokens: of all attempts, also of those that were broken off.
        energy_mj: attributed to attempts.
    """

    tasks: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    energy_mj: int = 0


class DayRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A day as it is kept on disk.

    Args:
        day: for example "2026-12-02"; empty until it is known.
        work_mj: what the cards drew while tasks ran, by the name of the method by which it is known.
        idle_mj: what they drew while an engine held them and no task ran.
        unmeasured_s: card seconds of work about which nothing is known.
        lost: what was counted earlier on this day cannot be read.
    """

    day: str = ""
    models: dict[str, ModelDay] = {}
    work_mj: dict[str, int] = {}
    idle_mj: int = 0
    unmeasured_s: float = 0.0
    lost: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(model.prompt_tokens for model in self.models.values())

    @property
    def completion_tokens(self) -> int:
        return sum(model.completion_tokens for model in self.models.values())

    @property
    def tasks(self) -> int:
        return sum(model.tasks for model in self.models.values())


class DayCounts:
    """The counts of the day that runs.

    Args:
        record: as loaded, or empty; taken over and changed.
    """

    def __init__(self, record: DayRecord) -> None:
        self._record = record
        self._work_seen: Counter[EnergyMethod] = Counter()
        self._idle_seen = 0
        self._unmeasured_seen = 0.0

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens of today; `TOKENS_NOT_KNOWN` where a part of the day was lost."""
        if self._record.lost:
            return TOKENS_NOT_KNOWN
        return self._record.prompt_tokens + self._record.completion_tokens

    def snapshot(self) -> DayRecord:
        """Return a copy that does not change."""
        record = self._record
        models = {name: msgspec.structs.replace(model) for name, model in record.models.items()}
        return msgspec.structs.replace(record, models=models, work_mj=dict(record.work_mj))

    def day_is(self, day: str) -> None:
        """Note the owner's local day; another than before starts the counts again."""
        if day == self._record.day:
            return
        if self._record.lost and not self._record.day:
            # Of which day the lost counts were is not known either; it may be this one.
            self._record.day = day
            return
        back = date.fromisoformat(self._record.day) - date.fromisoformat(day) if self._record.day else None
        if back is None or not 0 < back.days <= DAYS_BACK_MAX:
            self._record = DayRecord(day=day)

    def ended(self, model: str, prompt_tokens: int, completion_tokens: int, energy: TaskEnergy, *, whole: bool) -> None:
        """Count an attempt that worked here.

        Args:
            whole: it ended by itself, and was not broken off.
        """
        counts = self._record.models.setdefault(model, ModelDay())
        counts.tasks += whole
        counts.prompt_tokens += prompt_tokens
        counts.completion_tokens += completion_tokens
        counts.energy_mj += energy.energy_mj

    def drew(self, totals: EnergyTotals) -> None:
        """Count what the cards drew since the last time.

        Args:
            totals: of the meter, since it was made.
        """
        for method, work_mj in totals.work_mj.items():
            self._record.work_mj[method.value] = (
                self._record.work_mj.get(method.value, 0) + work_mj - self._work_seen[method]
            )
        self._record.idle_mj += totals.idle_mj - self._idle_seen
        self._record.unmeasured_s += totals.unmeasured_s - self._unmeasured_seen
        self._work_seen = totals.work_mj.copy()
        self._idle_seen = totals.idle_mj
        self._unmeasured_seen = totals.unmeasured_s
