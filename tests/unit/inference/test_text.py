import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference.text import Message, TemplateError, Tokenizer

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "golden" / "text.json").read_text())
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # one picture of five code points, 18 bytes

# Few: each example goes through the whole vocabulary's table.
relaxed = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
token_ids = st.lists(
    # Low ids are single bytes, so that broken characters are frequent.
    st.one_of(st.integers(0, 49_151), st.integers(0, 300)),
    max_size=40,
)


@pytest.mark.parametrize("chat", GOLDEN["chats"], ids=lambda chat: chat["title"])
def test_a_chat_becomes_the_ids_that_transformers_makes_of_it(smollm2: Tokenizer, chat: dict[str, Any]) -> None:
    """Mutation seen to fail: trim_blocks off; add_special_tokens for a rendered chat is told apart below."""
    messages = [Message(**message) for message in chat["messages"]]
    assert smollm2.render(messages) == chat["text"]
    assert smollm2.encode_chat(messages).tolist() == chat["ids"]
    assert [smollm2.encode(message.content).tolist() for message in messages] == chat["content_ids"]


def test_a_lone_surrogate_is_refused_with_its_place(smollm2: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"lone surrogate, U\+D83D, at character 3"):
        smollm2.encode("abc\ud83d")
    with pytest.raises(ValueError, match="lone surrogate"):
        smollm2.encode_chat([Message("user", "\udc00")])


@relaxed
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_the_bytes_of_the_ids_are_the_bytes_of_the_text(smollm2: Tokenizer, text: str) -> None:
    """Save for a few bytes that SmolLM2's vocabulary lacks (some control characters, beginnings of rare planes)."""
    known = {smollm2.token_bytes(token_id) for token_id in range(smollm2.vocabulary_size)}
    readable = bytes(byte for byte in text.encode() if bytes([byte]) in known)
    assert b"".join(smollm2.token_bytes(token_id) for token_id in smollm2.encode(text)) == readable


@relaxed
@given(ids=token_ids, data=st.data())
def test_any_cut_of_any_ids_gives_the_text_of_a_whole_decode(
    smollm2: Tokenizer, smollm2_backend: tokenizers.Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    """Whole, id by id and in random frames, over ids that no model would produce.

    Mutation seen to fail: decoding each frame by itself; errors="ignore"; the special tokens shown.
    """
    expected = smollm2_backend.decode(ids, skip_special_tokens=True)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    frames = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    for division in ([ids], [[token_id] for token_id in ids], frames):
        detokenizer = smollm2.detokenizer()
        text = "".join([detokenizer.feed(frame) for frame in division]) + detokenizer.finish()
        assert text == expected


def test_half_a_character_is_never_shown(smollm2: Tokenizer) -> None:
    ids = smollm2.encode(FAMILY + "e\u0301漢字")
    detokenizer = smollm2.detokenizer()
    pieces = [detokenizer.feed([token_id]) for token_id in ids]
    assert "".join(pieces) == FAMILY + "e\u0301漢字"
    assert "" in pieces, "the text was meant to hold characters of several tokens"
    assert "\ufffd" not in "".join(pieces)


def test_bytes_that_never_become_a_character_are_not_held_back(smollm2: Tokenizer) -> None:
    """The fake engine repeats such ids; a decoder that waits for a valid ending would wait for ever.

    Mutation seen to fail: tokenizers' own DecodeStream in place of the byte decoder.
    """
    continuation = next(i for i in range(smollm2.vocabulary_size) if smollm2.token_bytes(i) == b"\x80")
    detokenizer = smollm2.detokenizer()
    for shown in range(1, 1000):
        assert detokenizer.feed([continuation]) == "\ufffd", f"after {shown} ids"


def test_an_incomplete_character_at_the_end_is_one_replacement_character(smollm2: Tokenizer) -> None:
    half = next(i for i in range(smollm2.vocabulary_size) if smollm2.token_bytes(i) == b"\xc3")
    detokenizer = smollm2.detokenizer()
    assert detokenizer.feed([half]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_have_bytes_but_are_not_shown(smollm2: Tokenizer) -> None:
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.detokenizer().feed([2, 1, 0]) == ""


def test_ids_outside_the_vocabulary_show_nothing(smollm2: Tokenizer) -> None:
    (letter,) = smollm2.encode("a")
    assert smollm2.token_bytes(smollm2.vocabulary_size) == b""
    assert smollm2.detokenizer().feed([letter, 2**32 - 1, smollm2.vocabulary_size, letter]) == "aa"


def test_threads_may_share_a_tokenizer(smollm2: Tokenizer) -> None:
    texts = [f"{word} {FAMILY} {number}" * 50 for number, word in enumerate(("one", "zwei", "три", "四") * 4)]
    expected = [smollm2.encode_chat([Message("user", text)]) for text in texts]
    found: list[Any] = [None] * len(texts)

    def work(index: int) -> None:
        found[index] = smollm2.encode_chat([Message("user", texts[index])])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_a_model_without_template_refuses_chats_but_reads_text(smollm2_directory: Path, tmp_path: Path) -> None:
    shutil.copy(smollm2_directory / "tokenizer.json", tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a b")
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer.render([Message("user", "Hi")])


def test_a_template_in_the_config_is_found_and_gets_the_special_tokens(smollm2_directory: Path, tmp_path: Path) -> None:
    shutil.copy(smollm2_directory / "tokenizer.json", tmp_path)
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": [
            {"name": "tool_use", "template": "wrong"},
            {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).render([Message("user", "Hi")]) == "<s>Hi</s>"


def test_a_prompt_is_never_cut_padded_or_given_marks_twice(smollm2_directory: Path, tmp_path: Path) -> None:
    """Mutation seen to fail: without no_truncation; with add_special_tokens for a rendered chat."""
    shutil.copy(smollm2_directory / "chat_template.jinja", tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(smollm2_directory / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    plain = Tokenizer.load(smollm2_directory)
    text = "one two three four five six"
    assert tokenizer.encode(text).tolist() == [1, *plain.encode(text)]
    assert tokenizer.encode_chat([Message("user", text)]) == plain.encode_chat([Message("user", text)])


def test_sentencepiece_vocabularies_come_out_as_text(tmp_path: Path) -> None:
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581Hello", "\u2581world", "漢"]
    specification = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "vocab": {token: index for index, token in enumerate(vocabulary)},
            "merges": [],
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(specification))
    tokenizer = Tokenizer.load(tmp_path)
    emoji = [1 + byte for byte in "🙂".encode()]
    ids = [257, 258, 259, *emoji, 258]
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(ids) == "Hello world漢🙂 world"
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.feed([token_id]) for token_id in ids) == "Hello world漢🙂 world"
    assert detokenizer.feed([256]) == "\ufffd"


def test_a_damaged_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_decoder_that_loses_bytes_is_refused(smollm2_directory: Path, tmp_path: Path) -> None:
    specification = json.loads((smollm2_directory / "tokenizer.json").read_text())
    specification["decoder"] = {"type": "CTC", "pad_token": "-", "word_delimiter_token": "|", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(specification))
    with pytest.raises(ValueError, match="not supported: CTC"):
        Tokenizer.load(tmp_path)


@pytest.fixture(scope="session")
def smollm2_backend(smollm2_directory: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(smollm2_directory / "tokenizer.json"))
