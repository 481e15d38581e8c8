"""The main job, to watch: three agents, one question, one kill in mid-answer, one owner who comes back.

Starts a network of real processes, asks a real model, kills the agent that is
answering, and checks that the answer goes on from another one to the letter.
Then asks again, and gives the next agent back to its owner in mid-answer. At
last, with a real model, an agent whose engine cheats is found and quarantined.
Exit status 0 only if every check held.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import openai
from child_process import end_on_signals
from demo_cheat import can_be_shown, catch_a_cheat
from dev_network import DevNetwork
from network_settings import EngineOptions, NetworkError, gpu_uuids
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from slackwater import (
    Answer,
    AsyncClient,
    AttemptBroken,
    AttemptStarted,
    Completion,
    Delta,
    Node,
    SlackwaterError,
    VerificationError,
)

QUESTION = "Write a short story about a lighthouse keeper and the tide."
# Greedy, SmolLM2 goes on for far longer than this, so that a kill after KILL_AFTER_TOKENS is in mid-answer.
ANSWER_TOKENS = 160
KILL_AFTER_TOKENS = 60
# A command takes a second to start, and the answer goes on meanwhile.
PAUSE_AFTER_TOKENS = 20
AGENTS = 3
# Greedy answers need none; the fake engine's do, being a hash of everything.
SEED = 7
# A whole answer of a small model on a busy machine without a GPU.
ANSWER_TIMEOUT_S = 180.0
# One colour for each agent; the colour of the text tells who wrote it.
COLOURS = ("cyan", "green", "magenta")
# Of the picture; the agent's `status` is a little narrower.
PICTURE_COLUMNS = 120
# An answer comes in parts of words: a line ends at a space, if there is one this close to the edge.
WORD_COLUMNS = 12


@dataclass
class Story:
    """What happened to the disturbed answer."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    attempts: list[AttemptStarted] = field(default_factory=list)
    broken: list[AttemptBroken] = field(default_factory=list)
    struck_after_tokens: int = 0
    gap_ms: float = 0.0


@dataclass(frozen=True)
class Check:
    name: str
    held: bool
    detail: str


class Demo:
    def __init__(self, console: Console, network: DevNetwork, kind: str) -> None:
        self.console = console
        self.kind = kind
        self.network = network
        self.checks: list[Check] = []
        self.pausing: asyncio.Task[str] | None = None
        # Where in its line the answer that is being read has got to.
        self.column = 0

    async def run(self) -> bool:
        """Tell the story; return whether everything held."""
        async with self.network.client() as client:
            nodes = await client.nodes()
            self.chapter("The fleet")
            self.show_fleet(nodes)
            self.chapter("A question, and a kill in mid-answer")
            answer = self.ask(client)
            story = await self.tell(answer, KILL_AFTER_TOKENS, self.kill)
            self.check_moved("failover", story, "stream_lost")
            self.chapter("The same question, undisturbed")
            undisturbed = await asyncio.wait_for(self.ask(client), ANSWER_TIMEOUT_S)
            self.compare(story, undisturbed)
            self.check_bill(undisturbed)
            self.chapter("Who vouches for what")
            self.verify(answer)
            await self.show_attempts(client, answer)
        self.chapter("An OpenAI client, which knows nothing of all this")
        await self.ask_through_openai(undisturbed)
        self.chapter("The owner comes back in mid-answer")
        returned = await self.give_back(undisturbed)
        if can_be_shown(self.kind):
            self.chapter("An agent whose engine serves fewer bits than it says")
            await catch_a_cheat(self)
        return self.summarise(story, returned)

    def chapter(self, title: str) -> None:
        self.console.print()
        self.console.print(Rule(f"[bold]{title}", align="left", style="blue"))

    def check(self, name: str, held: bool, detail: str) -> None:
        self.checks.append(Check(name, held, detail))
        mark = "[bold green]✓[/]" if held else "[bold red]✗[/]"
        self.console.print(f"{mark} {name}: [dim]{escape(detail)}[/]", highlight=False)

    def ask(self, client: AsyncClient) -> Answer:
        model = self.network.ready.model
        return client.chat(QUESTION, model=model, temperature=0, seed=SEED, max_tokens=ANSWER_TOKENS)

    def name_of(self, node_id: str) -> str:
        index = self.network.index_of(node_id)
        return f"[{COLOURS[index % len(COLOURS)]}]agent-{index + 1}[/]"

    def show_fleet(self, nodes: list[Node]) -> None:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("node", "hardware", "memory", "power", "engine", "model", "tokens/s *"):
            table.add_column(column, no_wrap=True)
        for node in sorted(nodes, key=lambda node: node.label):
            engine = node.engines[0]
            table.add_row(
                self.name_of(node.node_id),
                hardware(node),
                memory(node),
                power(node),
                engine.kind if engine.fenced else f"{engine.kind} [yellow](unfenced)[/]",
                engine.model,
                f"{engine.tokens_per_second:.0f}",
            )
        self.console.print(table)
        self.console.print("[dim]* measured by the agent when its engine started: self-reported, not verified")
        self.check(
            "fleet", len(nodes) == AGENTS, f"{len(nodes)} nodes of {len({node.owner_id for node in nodes})} owners"
        )

    async def tell(self, answer: Answer, after_tokens: int, strike: Callable[[int], Awaitable[None]]) -> Story:
        """Stream the answer; once `after_tokens` ids have come, strike the agent that is answering."""
        story = Story()
        self.console.print(f"[bold]» {QUESTION}[/]\n")
        arrived_s = time.monotonic()
        waiting_for_seam = False
        style = ""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            async for event in answer:
                if isinstance(event, AttemptStarted):
                    story.attempts.append(event)
                    style = COLOURS[self.network.index_of(event.node_id) % len(COLOURS)]
                elif isinstance(event, AttemptBroken):
                    story.broken.append(event)
                elif isinstance(event, Delta):
                    if waiting_for_seam and event.first_index == story.attempts[-1].first_index:
                        story.gap_ms = (time.monotonic() - arrived_s) * 1000
                        waiting_for_seam = False
                    arrived_s = time.monotonic()
                    story.token_ids += event.token_ids
                    story.text += event.text
                    self.write(event.text, style)
                if not story.struck_after_tokens and len(story.token_ids) >= after_tokens:
                    story.struck_after_tokens = len(story.token_ids)
                    await strike(self.network.index_of(story.attempts[-1].node_id))
                    waiting_for_seam = True
        self.write("\n\n", style)
        return story

    def check_moved(self, name: str, story: Story, reason: str) -> None:
        moved = len(story.attempts) > 1 and [broken.reason for broken in story.broken] == [reason]
        where = " → ".join(self.plain_name(attempt.node_id) for attempt in story.attempts)
        self.check(name, moved, f"{where}, {story.gap_ms:.0f} ms between the last token and the next")

    async def kill(self, index: int) -> None:
        pid = self.network.ready.agents[index].pid
        await self.network.kill_agent(index)
        self.mark(f"kill -9 {pid}: agent-{index + 1} is gone")

    async def pause(self, index: int) -> None:
        """Begin what the owner of an agent does; the answer is read on meanwhile."""
        if self.pausing is None:
            self.pausing = asyncio.create_task(self.network.agent_command(index, "pause"))
            self.mark(f"slackwater-agent pause: the owner of agent-{index + 1} wants the machine")

    def mark(self, text: str) -> None:
        """Show in the midst of an answer what happens."""
        self.write(f"⟦{text}⟧", "bold white on red")

    def write(self, text: str, style: str) -> None:
        """Add to an answer that is being read. A picture wraps no lines, and a terminal does so in mid-word."""
        for piece in text.splitlines(keepends=True):
            left = self.console.width - self.column - len(piece)
            if left < 0 or (left < WORD_COLUMNS and piece.startswith(" ")):
                self.console.print()
                self.column, piece = 0, piece.lstrip(" ")
            self.console.print(Text(piece, style=style), end="", soft_wrap=True)
            self.column = 0 if piece.endswith("\n") else self.column + len(piece)

    async def give_back(self, undisturbed: Completion) -> Story:
        """Pause the agent that is answering, show what it says of itself, and let it lend again."""
        async with self.network.client() as client:
            story = await self.tell(self.ask(client), PAUSE_AFTER_TOKENS, self.pause)
            assert self.pausing is not None, "an answer has more ids than that"
            while not story.broken and not self.pausing.done():
                # A fast card ends an answer before the command has started; the next one runs on the same card.
                story = await self.tell(self.ask(client), PAUSE_AFTER_TOKENS, self.pause)
        said = await self.pausing
        self.check_moved("given back", story, "owner_returned")
        self.compare(story, undisturbed)
        index = self.network.index_of(story.attempts[0].node_id)
        self.quote("pause", said)
        status = await self.network.agent_command(index, "status")
        self.quote("status", status)
        held = "free after" in said and "given back" in status and "paused by the owner" in status
        self.check("owner first", held, f"agent-{index + 1} {said.strip()}")
        said = await self.network.agent_command(index, "resume")
        self.quote("resume", said)
        self.check("lent again", "lent:" in said, f"agent-{index + 1}, once its owner said so")
        return story

    def quote(self, command: str, said: str) -> None:
        lines = "\n".join(line.rstrip() for line in said.splitlines() if line.strip())
        self.console.print(f"[bold]$ slackwater-agent {command}[/]\n{escape(lines)}", highlight=False, soft_wrap=True)

    def plain_name(self, node_id: str) -> str:
        return f"agent-{self.network.index_of(node_id) + 1}"

    def compare(self, story: Story, undisturbed: Completion) -> None:
        nobody_died = not undisturbed.broken_attempts
        same_ids = story.token_ids == undisturbed.token_ids
        count = len(undisturbed.token_ids)
        if story.text != undisturbed.text:
            self.console.print(Text(undisturbed.text))
        self.check(
            "same answer",
            nobody_died and same_ids and story.text == undisturbed.text,
            f"{count} token ids and {len(undisturbed.text)} characters, "
            + ("all equal" if same_ids and story.text == undisturbed.text else "they differ"),
        )

    def check_bill(self, undisturbed: Completion) -> None:
        self.check(
            "right bill",
            undisturbed.usage.completion_tokens == len(undisturbed.token_ids),
            f"{undisturbed.usage.prompt_tokens} prompt and {undisturbed.usage.completion_tokens} completion tokens",
        )

    def verify(self, answer: Answer) -> None:
        try:
            statement = answer.verify()
        except VerificationError as error:
            self.check("signed statement", False, str(error))
            return
        self.check(
            "signed statement",
            statement.header_signature_checked,
            f"{self.plain_name(statement.node_id)} signed for tokens {statement.first_index} to "
            f"{statement.first_index + len(statement.token_ids) - 1}",
        )

    async def show_attempts(self, client: AsyncClient, answer: Answer) -> None:
        assert answer.task_id is not None
        task = await client.get_task(answer.task_id)
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("attempt", "node", "from", "tokens", "outcome", "whose word"):
            table.add_column(column, no_wrap=True)
        for attempt in task.attempts:
            word = "the node's, signed" if attempt.signed else "the coordinator's own record"
            name = self.name_of(attempt.node_id)
            row = (str(attempt.first_index), str(attempt.delivered_tokens), attempt.outcome, word)
            table.add_row(str(attempt.attempt), name, *row)
        self.console.print(table)
        broken = [attempt for attempt in task.attempts if attempt.outcome != "finished"]
        finished = [attempt for attempt in task.attempts if attempt.outcome == "finished"]
        self.check(
            "broken attempt on record",
            bool(broken) and not any(attempt.signed for attempt in broken) and [a.signed for a in finished] == [True],
            f"{len(broken)} broken and unsigned, {len(finished)} finished and signed",
        )

    async def ask_through_openai(self, undisturbed: Completion) -> None:
        ready = self.network.ready
        async with openai.AsyncOpenAI(base_url=f"{ready.gateway_url}/v1", api_key=ready.api_key) as client:
            stream = await client.chat.completions.create(
                model=ready.model,
                messages=[{"role": "user", "content": QUESTION}],
                temperature=0,
                seed=SEED,
                max_tokens=ANSWER_TOKENS,
                stream=True,
                stream_options={"include_usage": True},
            )
            text, tokens = "", 0
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        self.check(
            "openai client",
            text == undisturbed.text and tokens == undisturbed.usage.completion_tokens,
            f"{len(text)} characters over HTTP, {tokens} tokens in usage",
        )

    def summarise(self, killed: Story, returned: Story) -> bool:
        failed = [check.name for check in self.checks if not check.held]
        self.console.print()
        if failed:
            self.console.print(f"[bold red]✗ did not hold: {', '.join(failed)}[/]")
            return False
        self.console.print(
            f"[bold green]✓ all {len(self.checks)} checks held:[/] killed after {killed.struck_after_tokens} of "
            f"{len(killed.token_ids)} tokens, resumed in {killed.gap_ms:.0f} ms; given back, resumed in "
            f"{returned.gap_ms:.0f} ms; none lost, none twice",
            highlight=False,
        )
        return True


def hardware(node: Node) -> str:
    names = [gpu.name.value or f"GPU ({gpu.name.status})" for gpu in node.gpus]
    return ", ".join(names) if names else f"CPU, {node.host.cpu_cores} cores"


def memory(node: Node) -> str:
    if not node.gpus:
        return f"{node.host.memory_total_bytes / 2**30:.0f} GiB"
    totals = [gpu.memory_total_bytes for gpu in node.gpus]
    return ", ".join(f"{total.value / 2**30:.0f} GiB" if total.value is not None else total.status for total in totals)


def power(node: Node) -> str:
    draws = [gpu.power_draw_w for gpu in node.gpus]
    shown = [f"{draw.value:.0f} W" if draw.value is not None else draw.status for draw in draws]
    return ", ".join(shown) if shown else "unknown"


def choose_engine() -> str:
    """Return vllm where there is an NVIDIA card and the environment for it, else torch."""
    return "vllm" if EngineOptions(kind="vllm").interpreter.exists() and gpu_uuids() else "torch"


async def run(console: Console, kind: str) -> bool:
    console.print(Rule("[bold]Slackwater", style="blue"))
    console.print(f"A coordinator and {AGENTS} agents, each a process of its own, with the {kind} engine.")

    def say(message: str) -> None:
        console.print(f"[dim]· {escape(message)}[/]", highlight=False)

    async with DevNetwork(agents=AGENTS, engine=EngineOptions(kind=kind), say=say) as network:
        return await Demo(console, network, kind).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["auto", "torch", "vllm", "fake"], default="auto")
    parser.add_argument("--svg", type=Path, help="also save what was shown as a picture")
    options = parser.parse_args()
    end_on_signals()
    console = Console(record=options.svg is not None, width=PICTURE_COLUMNS if options.svg is not None else None)
    kind = choose_engine() if options.engine == "auto" else options.engine
    try:
        held = asyncio.run(run(console, kind))
    except (NetworkError, SlackwaterError, openai.OpenAIError, TimeoutError) as error:
        console.print(f"[bold red]✗ the demo broke off:[/] {escape(str(error) or type(error).__name__)}")
        held = False
    except KeyboardInterrupt:
        sys.exit(130)
    if options.svg is not None:
        console.save_svg(str(options.svg), title="make demo")
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
