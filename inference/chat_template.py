"""Rendering of a model's chat template, in a sandbox. No I/O and no clock.

A chat template is a Jinja program that comes with the model. It is as far
from being trusted as the model is: it gets the messages and nothing else, may
change nothing, and is bounded in steps and in the text it makes. Its output
is that of transformers' `apply_chat_template(add_generation_prompt=True)`.

`strftime_now` is left undefined: equal messages must give equal ids wherever
and whenever they are rendered. Templates that ask for today's date test for
it first and fall back to a fixed one; those that do not are refused.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# A million tokens of prose; no context in use takes more.
RENDERED_CHARACTERS_MAX = 8 * 1024 * 1024
# Turns of loops and calls of macros in one rendering. Templates take a few for
# each message, some a few for each line of it; this many take half a second.
STEPS_MAX = 200_000


class TemplateError(ValueError):
    """The model's chat template refused the messages; the text is the template's."""


class ChatTemplate:
    """A compiled template. Safe to use from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            tree = _ENVIRONMENT.parse(source)
            code = _ENVIRONMENT.compile(
                _Bounded(_BOUNDS).visit(tree), name="chat_template", filename="chat_template.jinja"
            )
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"the model's chat template is not valid: {error}") from error
        self._template = jinja2.Template.from_code(_ENVIRONMENT, code, _ENVIRONMENT.make_globals(None))

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt that asks the model to answer the chat.

        Raises:
            TemplateError: the template refused or could not handle the messages, or ran past a limit.
        """
        blocks: list[str] = []
        characters = 0
        try:
            for block in self._template.generate(
                {
                    **self._special_tokens,
                    "messages": [dict(message) for message in messages],
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": True,
                    _STEPS: itertools.count(1),
                }
            ):
                characters = _within_limit(characters + len(block))
                blocks.append(block)
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template cannot render these messages: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # Their texts may quote the messages, which no log may hold.
            raise TemplateError(
                f"the model's chat template cannot render these messages: {type(error).__name__} in the template"
            ) from error
        return "".join(blocks)


# No name that a template could spell.
_STEPS = "steps taken!"


def _within_limit(characters: int) -> int:
    if characters > RENDERED_CHARACTERS_MAX:
        raise TemplateError(f"the rendered prompt has more than {RENDERED_CHARACTERS_MAX} characters")
    return characters


class _Bounds(Extension):
    """What templates are made to call as they go, by a kind of reference that no template can spell."""

    @jinja2.pass_context
    def count_step(self, context: Context) -> str:
        if next(context.parent[_STEPS]) > STEPS_MAX:
            raise TemplateError(f"the model's chat template takes more than {STEPS_MAX} steps for these messages")
        return ""

    def join(self, *parts: object) -> str:
        """Concatenate as `~` does: doubling a text in a loop takes few steps and no end of memory."""
        texts = [str(part) for part in parts]
        _within_limit(sum(map(len, texts)))
        return "".join(texts)


class _Bounded(NodeTransformer):
    """Makes a template count its steps in every loop and macro, and join within the limit."""

    def __init__(self, bounds: _Bounds) -> None:
        self._bounds = bounds

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._counting(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counting(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._bounds.call_method("join", node.nodes, lineno=node.lineno)

    def _counting(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        step = self._bounds.call_method("count_step", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TemplateError("the model's chat template raises to a power, which is not supported")
        if operator == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
            _within_limit(len(left) + len(right))
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, Sequence) and isinstance(times, int):
                    _within_limit(len(items) * times)
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}`, which marks an answer in training data and means nothing here."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Bounds, _GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


_ENVIRONMENT = _environment()
_BOUNDS = _Bounds(_ENVIRONMENT)
