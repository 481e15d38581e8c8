"""What the readings of a card tell about its owner."""

from agent.cards.details import SLEEPING, CardDetails, GpuProcess
from agent.cards.testing import GIB
from agent.cards.use import SETTLE_S, CardReading, CardWatch
from agent.owner.events import CardUseObserved, ForeignProcess, TemperatureObserved, Unknown
from protos.slackwater.common.v1.capability_pb2 import (
    READING_STATUS_LOST,
    READING_STATUS_OK,
    READING_STATUS_UNSUPPORTED,
    Gpu,
    NumberReading,
    TextReading,
)

UUID = "GPU-1"


def reading(*processes: GpuProcess, temperature: NumberReading | None = None, **details: object) -> CardReading:
    gpu = Gpu(
        uuid=TextReading(status=READING_STATUS_OK, value=UUID),
        memory_free_bytes=NumberReading(status=READING_STATUS_OK, value=10 * GIB),
        temperature_c=temperature or NumberReading(status=READING_STATUS_OK, value=50.0),
    )
    fields = {"processes": processes, "memory_used_bytes": 14 * GIB} | details
    return CardReading(gpu, CardDetails(**fields))  # type: ignore[arg-type]


def use(card: CardReading, watch: CardWatch | None = None, now: float = 0.0) -> CardUseObserved:
    event = (watch or CardWatch()).observe(card, now)[0]
    assert isinstance(event, CardUseObserved)
    return event


def heat(card: CardReading) -> TemperatureObserved:
    event = CardWatch().observe(card, 0.0)[1]
    assert isinstance(event, TemperatureObserved)
    return event


def process(
    pid: int, name: str, kind: str = "graphics", memory_bytes: int | None = GIB, ours: bool = False
) -> GpuProcess:
    return GpuProcess(pid, name, kind, memory_bytes, ours)


def test_a_game_is_foreign_and_the_desktop_and_our_engine_are_not() -> None:
    """Mutation tried: without `not one.ours`, an agent gives its card back as soon as its engine is up."""
    seen = use(
        reading(
            process(1, "gnome-shell"),
            process(2, "Xwayland"),
            process(3, "factorio"),
            process(4, "python3", kind="compute", ours=True),
        )
    )
    assert seen.processes == (ForeignProcess(3, "factorio", "graphics", GIB),)


def test_a_program_with_a_desktops_name_that_computes_is_foreign() -> None:
    """Mutation tried: looking at the name alone."""
    for kind in ("compute", "both"):
        assert use(reading(process(1, "Xorg", kind=kind))).processes != ()


def test_long_names_are_known_as_the_kernel_cuts_them() -> None:
    assert use(reading(process(1, "mutter-x11-fram"))).processes == ()


def test_programs_that_the_owner_names_may_stay_on_the_card() -> None:
    watch = CardWatch(["firefox", "a-program-with-a-long-name"])
    card = reading(process(1, "firefox"), process(2, "firefox", kind="both"), process(3, "a-program-with-"))
    assert use(card, watch).processes == ()


def test_a_process_whose_name_is_hidden_is_named_by_its_number() -> None:
    assert use(reading(process(7, ""))).processes == (ForeignProcess(7, "process 7", "graphics", GIB),)


def test_foreign_memory_is_what_is_used_and_not_ours() -> None:
    card = reading(process(1, "game", memory_bytes=GIB), process(2, "python3", memory_bytes=12 * GIB, ours=True))
    seen = use(card)
    assert (seen.foreign_memory_bytes, seen.free_memory_bytes) == (2 * GIB, 10 * GIB)


def test_foreign_memory_is_unknown_where_our_own_is_or_the_list_is() -> None:
    """Mutation tried: None counted as 0 takes our whole engine for the owner's game."""
    assert use(reading(process(2, "python3", memory_bytes=None, ours=True))).foreign_memory_bytes is None
    assert use(reading(processes=None)).foreign_memory_bytes is None
    assert use(reading(memory_used_bytes=None)).foreign_memory_bytes is None


def test_memory_of_our_engine_that_was_just_killed_is_not_taken_for_the_owners() -> None:
    """The driver frees it a second later. Mutation tried: SETTLE_S of 0."""
    watch = CardWatch()
    ours = process(2, "python3", memory_bytes=12 * GIB, ours=True)
    assert use(reading(ours), watch, now=0.0).foreign_memory_bytes == 2 * GIB
    assert use(reading(), watch, now=1.0).foreign_memory_bytes is None
    assert use(reading(), watch, now=1.0 + SETTLE_S - 0.1).foreign_memory_bytes is None
    assert use(reading(memory_used_bytes=2 * GIB), watch, now=1.0 + SETTLE_S).foreign_memory_bytes == 2 * GIB


def test_a_list_that_does_not_exist_and_one_that_failed_are_two_things() -> None:
    assert use(reading(processes=None, processes_absent=True)).processes is Unknown.ABSENT
    assert use(reading(processes=None)).processes is Unknown.BROKEN


def test_a_card_that_does_not_answer_says_so() -> None:
    lost = NumberReading(status=READING_STATUS_LOST)
    card = CardReading(Gpu(uuid=TextReading(status=READING_STATUS_OK, value=UUID), temperature_c=lost), None)
    assert use(card) == CardUseObserved(UUID, Unknown.BROKEN, None, None)
    assert heat(card) == TemperatureObserved(UUID, Unknown.BROKEN, None, False)


def test_nobody_uses_a_card_that_sleeps() -> None:
    unsupported = NumberReading(status=READING_STATUS_UNSUPPORTED)
    gpu = Gpu(
        uuid=TextReading(status=READING_STATUS_OK, value=UUID),
        memory_free_bytes=unsupported,
        temperature_c=unsupported,
    )
    assert use(CardReading(gpu, SLEEPING)) == CardUseObserved(UUID, (), None, None)
    assert heat(CardReading(gpu, SLEEPING)).temperature_c is Unknown.ABSENT


def test_a_card_that_never_told_its_uuid_is_no_card_of_the_owners_policy() -> None:
    nameless = CardReading(Gpu(uuid=TextReading(status=READING_STATUS_LOST)), None)
    assert CardWatch().observe(nameless, 0.0) == []


def test_heat_is_told_with_the_cards_own_limit_and_whether_it_slows_down_because_of_it() -> None:
    assert heat(reading(slowdown_c=90.0)) == TemperatureObserved(UUID, 50.0, 90.0, False)
    for reasons, throttled in ((0x1, False), (0x4, False), (0x20, True), (0x40, True), (0x44, True), (None, False)):
        assert heat(reading(clock_event_reasons=reasons)).throttled is throttled


def test_a_power_brake_is_no_heat() -> None:
    assert not heat(reading(clock_event_reasons=0x88)).throttled
