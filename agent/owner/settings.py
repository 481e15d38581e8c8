"""When an owner lets the machine be lent: table `[owner]` of the agent's file."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agent.owner.schedule import parse_schedule


class OwnerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[owner]`. The waits are HTCondor's StartIdleTime and ContinueIdleTime."""

    mode: Annotated[
        Literal["auto", "always", "never"],
        Meta(description="auto: while nobody is here; always: also while somebody works here; never: nothing is lent"),
    ] = "auto"
    start_idle_s: Annotated[float, Meta(ge=10, le=86_400, description="without input before the first lending")] = 900.0
    continue_idle_s: Annotated[
        float, Meta(ge=10, le=86_400, description="without input before the next lending of the same absence")
    ] = 300.0
    when_input_unknown: Annotated[
        Literal["wait", "lend"],
        Meta(description='where nothing can see input, or a reader broke; "lend" is for machines without a seat'),
    ] = "wait"
    when_gpu_use_unknown: Annotated[
        Literal["wait", "lend"], Meta(description="where nobody can tell who else uses a card (WSL)")
    ] = "wait"
    lend_on_battery: Annotated[bool, Meta(description="a desktop behind a UPS may look like a battery")] = False
    lend_on_metered: Annotated[bool, Meta(description="answers are small; downloads wait on a metered network")] = True
    yield_to_programs: Annotated[bool, Meta(description="give a card back when another program uses it")] = True
    foreign_memory_growth_mib: Annotated[
        int, Meta(ge=1, le=1_048_576, description="give a card back when others take this much more of it")
    ] = 512
    free_memory_floor_mib: Annotated[
        int, Meta(ge=0, le=1_048_576, description="give a card back when less of it is free")
    ] = 256
    temperature_limit_c: (
        Annotated[float, Meta(ge=40, le=110, description="below the card's own limit, where it is too loud or hot")]
        | None
    ) = None
    hours: Annotated[
        tuple[str, ...], Meta(description='windows as "22:00-07:00" or "mon-fri 22:00-07:00"; none: always')
    ] = ()
    price_ceiling_per_kwh: Annotated[float, Meta(ge=0, le=1000, description="nothing is lent above it")] | None = None
    cool_down_s: Annotated[float, Meta(ge=0, le=86_400, description="from a give-back to the next lending")] = 300.0
    cool_down_max_s: Annotated[float, Meta(ge=0, le=86_400, description="while the owner comes and goes")] = 3600.0

    def __post_init__(self) -> None:
        parse_schedule(self.hours)
