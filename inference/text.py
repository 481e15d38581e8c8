"""Text to token ids and back: chat template, tokenizer, detokenizer.

Runs at the coordinator (or in an SDK on the direct path), never on a node.
Needs no torch. Rendering and encoding a long prompt takes longer than an event
loop may stand still: call them in a thread, where they release the
interpreter's lock.
"""

import codecs
import json
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from inference.chat_template import ChatTemplate, TemplateError
from inference.task import token_array

__all__ = ["Detokenizer", "Message", "TemplateError", "Tokenizer"]

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# SentencePiece's visible space.
_METASPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


class Tokenizer:
    """One model's text side, read from its tokenizer files. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, decoder: "_Decoder", template: ChatTemplate | None) -> None:
        self._backend = backend
        self._template = template
        added = backend.get_added_tokens_decoder()
        size = max([*backend.get_vocab(with_added_tokens=True).values(), -1]) + 1
        tokens = (backend.id_to_token(token_id) for token_id in range(size))
        self._bytes = [b"" if token is None else decoder.to_bytes(token) for token in tokens]
        # What a reader sees: special tokens are marks for the model.
        self._shown = [
            b"" if token_id in added and added[token_id].special else fragment
            for token_id, fragment in enumerate(self._bytes)
        ]
        self._strip_first_space = decoder.strip_first_space

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja.

        Raises:
            ValueError: names the file that is missing, damaged or not supported.
        """
        path = directory / "tokenizer.json"
        try:
            source = path.read_text(encoding="utf-8")
            backend = tokenizers.Tokenizer.from_str(source)
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}); fetch the model again") from error
        except Exception as error:  # the library raises nothing more exact
            raise ValueError(f"{path} is no tokenizer: {error}") from error
        # A prompt that is cut or padded behind the caller's back is another prompt.
        backend.no_truncation()
        backend.no_padding()
        decoder = _decoder(json.loads(source).get("decoder"), path)
        config = {
            **_read_json(directory / "special_tokens_map.json"),
            **_read_json(directory / "tokenizer_config.json"),
        }
        return cls(backend, decoder, _template(directory, config))

    @property
    def vocabulary_size(self) -> int:
        """One more than the highest id, added tokens included; the model may know some more, unused ids."""
        return len(self._bytes)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt text that asks the model to answer the chat.

        Raises:
            TemplateError: the template refused the messages, or the model has none.
        """
        if self._template is None:
            raise TemplateError("the model has no chat template: send a text prompt to the completions endpoint")
        return self._template.render([{"role": message.role, "content": message.content} for message in messages])

    def encode_chat(self, messages: Sequence[Message]) -> "array[int]":
        """Return the ids of a rendered chat. Raises as `render` and `encode`."""
        # The template has written every special token that belongs there.
        return self._encode(self.render(messages), add_special_tokens=False)

    def encode(self, text: str) -> "array[int]":
        """Return the ids of a text, with the special tokens that the model wants around one.

        Raises:
            ValueError: the text holds half of a surrogate pair, which is no character.
        """
        return self._encode(text, add_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that an id stands for, special tokens as they are spelled; none for an unused id."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def detokenizer(self) -> "Detokenizer":
        """Return a new detokenizer, for one answer."""
        return Detokenizer(self._shown, self._strip_first_space)

    def _encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}, "
                "which is no valid Unicode; send whole characters"
            ) from error
        # The call for one text, `encode`, keeps the interpreter's lock: 0.3 s
        # for 100,000 tokens, in which no event loop of the process moves.
        return token_array(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


class Detokenizer:
    """Turns ids into text as they come; holds back what is not yet a whole character.

    Never raises and never holds back more than three bytes: bytes that cannot
    become a character come out as U+FFFD, as in a decode of the whole. Ids
    outside the vocabulary and special tokens show nothing.
    """

    __slots__ = ("_decode", "_fragments", "_strip_first_space")

    def __init__(self, fragments: Sequence[bytes], strip_first_space: bool) -> None:
        self._fragments = fragments
        self._strip_first_space = strip_first_space
        self._decode: Callable[..., str] = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids complete."""
        fragments = self._fragments
        try:
            data = b"".join([fragments[token_id] for token_id in token_ids])
        except IndexError:
            data = b"".join([fragments[token_id] for token_id in token_ids if token_id < len(fragments)])
        if self._strip_first_space and data:
            self._strip_first_space = False
            data = data.removeprefix(b" ")
        return self._decode(data)

    def finish(self) -> str:
        """Return U+FFFD for a character that stayed incomplete, as a decode of the whole shows it, or nothing."""
        return self._decode(b"", True)


@dataclass(frozen=True, slots=True)
class _Decoder:
    """How one token becomes bytes."""

    to_bytes: Callable[[str], bytes]
    # SentencePiece puts a space before a text, which is not the text's.
    strip_first_space: bool = False


def _decoder(specification: Any, path: Path) -> _Decoder:
    """Return the decoder that tokenizer.json describes, of the two families that keep bytes."""
    steps = _steps(specification)
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return _Decoder(_byte_level)
    if "Metaspace" in kinds:
        return _Decoder(
            _sentence_piece, strip_first_space=steps[kinds.index("Metaspace")].get("prepend_scheme") != "never"
        )
    if "ByteFallback" in kinds:
        return _Decoder(_sentence_piece, strip_first_space="Strip" in kinds)
    if "WordPiece" in kinds:
        # Embedding models: they read text and write none.
        return _Decoder(str.encode)
    raise ValueError(f"{path} has a decoder that is not supported: {', '.join(map(str, kinds)) or 'none'}")


def _steps(specification: Any) -> list[dict[str, Any]]:
    if not isinstance(specification, dict):
        return []
    if specification.get("type") == "Sequence":
        return [step for step in specification.get("decoders", []) if isinstance(step, dict)]
    return [specification]


def _byte_alphabet() -> dict[str, int]:
    """Return the byte behind each character of byte-level BPE: printable ones are themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_ALPHABET[character] for character in token])
    except KeyError:
        # An added token is spelled in plain text.
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_METASPACE, " ").encode()


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of an optional file, empty where there is none."""
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON; fetch the model again") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} is not a JSON object; fetch the model again")
    return document


def _template(directory: Path, config: dict[str, Any]) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
    if isinstance(source, list):
        # Several templates by name, in older models.
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    special_tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            special_tokens[name] = content
    return ChatTemplate(source, special_tokens)
