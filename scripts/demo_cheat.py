"""The last chapter of the demo: an owner serves fewer bits under the model's name, and is found.

A network of its own, with an honest agent and one whose engine has 4-bit
weights. The agent itself is honest and cannot know: it has checked every byte
of the model. The coordinator has no model; it asks prompts whose answers it
knows (canaries), like any others, has known answers scored, and adds up what
speaks against each node.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from audited_network import TORCH, Audit, AuditedNetwork, Workshop
from rich.markup import escape

if TYPE_CHECKING:
    from demo import Demo

HONEST, CHEAT = 0, 1
# It took 25 s of canaries on two idle cores; a busy machine takes several times that.
FOUND_WITHIN_S = 300.0
LOOK_S = 0.5
# Asked after the verdict: several at once, which two nodes would share.
QUESTIONS = 4


async def catch_a_cheat(demo: "Demo") -> None:
    """Show how the node is found, what its owner is told, and who answers then."""
    with tempfile.TemporaryDirectory(prefix="sw-cheat-") as folder:
        demo.console.print("[dim]· agent-2's owner makes 4-bit weights of the model[/]")
        engines = await asyncio.to_thread(Workshop(Path(folder)).engines, "honest", "int4")
        async with AuditedNetwork(engines, say=lambda text: demo.console.print(f"[dim]· {escape(text)}[/]")) as network:
            await watch_canaries(demo, network)
            said = await network.agent_command(CHEAT, "why")
            demo.quote("why", said)
            demo.check("owner told why", "quarantined" in said, "with the audits that the verdict stands on")
            worked = await network.ask_many(QUESTIONS)
            demo.check(
                "served by others",
                worked == {HONEST},
                f"{QUESTIONS} answers asked afterwards, all by {', '.join(f'agent-{index + 1}' for index in worked)}",
            )


async def watch_canaries(demo: "Demo", network: AuditedNetwork) -> None:
    """Print what each canary says until the verdict."""
    began_s = time.monotonic()
    shown = {HONEST: 0, CHEAT: 0}
    state = ""
    async with asyncio.timeout(FOUND_WITHIN_S):
        while state != "quarantined":
            state = await asyncio.to_thread(network.state, CHEAT)
            for index, name in ((HONEST, "[green]agent-1[/]"), (CHEAT, "[red]agent-2[/]")):
                audits = await asyncio.to_thread(canaries, network, index)
                for number, audit in enumerate(audits[shown[index] :], start=shown[index] + 1):
                    word = "speaks against it" if audit.log_evidence > 0 else "speaks for it"
                    done = "scored" if audit.kind == "score" else "compared"
                    detail = f"{audit.tokens} ids {done}, {audit.log_evidence:+.1f} nats, {word}"
                    demo.console.print(f"canary {number} of {name}: {detail}", highlight=False)
                shown[index] = len(audits)
            await asyncio.sleep(LOOK_S)
    honest = await asyncio.to_thread(network.state, HONEST)
    demo.check(
        "cheat found",
        honest in ("probation", "ok"),
        f"agent-2 is quarantined after {shown[CHEAT]} canaries and {time.monotonic() - began_s:.0f} s; "
        f"agent-1 is {honest}",
    )


def canaries(network: AuditedNetwork, index: int) -> list[Audit]:
    """Return what canaries have said of an agent, by time. Blocks."""
    return sorted(network.audits(index, "canary") + network.audits(index, "score"), key=lambda audit: audit.at_ms)


def can_be_shown(kind: str) -> bool:
    """Whether there is a real model to cheat with, and an engine for it."""
    return kind != "fake" and TORCH.exists()
