"""The assembler, over a made-up vocabulary: ids 0 to 255 are the bytes, the rest are longer fragments."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.assembler import Assembler
from inference.text import Detokenizer

FRAGMENTS = [
    *(bytes([byte]) for byte in range(256)),
    b"",  # a special token
    b"STOP",
    b"ST",
    b"OP and more",
    " \U0001f468\u200d".encode(),
    b"\xf0\x9f\x91",  # three of the four bytes of an emoji
    b"\xa9\xe2\x80",
    b"abab",
]
SPECIAL = 256

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
# Few letters, so that stop strings and their beginnings are frequent.
ids_with_matches = st.lists(
    st.one_of(
        st.sampled_from([97, 98, 99]), st.integers(0, len(FRAGMENTS) - 1), st.sampled_from(list(FAMILY.encode()))
    ),
    max_size=30,
)
stops = st.lists(
    st.one_of(st.text("abc", min_size=1, max_size=5), st.sampled_from(["STOP", "\u200d\U0001f469", "P a", "\ufffd"])),
    max_size=4,
)


def detokenizer() -> Detokenizer:
    return Detokenizer(FRAGMENTS, strip_first_space=False)


def assemble(frames: Sequence[Sequence[int]], stop: Sequence[str]) -> tuple[str, int | None]:
    """Return the whole text of an answer and where it stopped; frames after a stop are fed all the same."""
    assembler = Assembler(detokenizer(), stop)
    text, stopped_at = "", None
    for frame in frames:
        piece = assembler.feed(frame)
        assert stopped_at is None or (piece.text, piece.stopped_at) == ("", stopped_at)
        text += piece.text
        stopped_at = piece.stopped_at
    return text + assembler.finish(), stopped_at


def expected(ids: Sequence[int], stop: Sequence[str]) -> tuple[str, int | None]:
    """The definition, at any cost: look for a stop string after every single character."""
    decoder = detokenizer()
    text = ""
    for count, token_id in enumerate(ids, start=1):
        for character in decoder.feed([token_id]):
            text += character
            for candidate in sorted(stop, key=len, reverse=True):
                if text.endswith(candidate):
                    return text.removesuffix(candidate), count
    return text, None


@given(ids=ids_with_matches, stop=stops, data=st.data())
def test_any_cut_of_an_answer_into_frames_gives_the_same_text(
    ids: list[int], stop: list[str], data: st.DataObject
) -> None:
    """Mutations seen to fail: the fallback of the matcher skipped; held text not prefixed; count taken per frame."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    frames = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    for division in ([ids], [[token_id] for token_id in ids], frames):
        assert assemble(division, stop) == expected(ids, stop)


@given(ids=ids_with_matches, garbage=ids_with_matches)
def test_what_comes_after_a_stop_is_not_shown(ids: list[int], garbage: list[int]) -> None:
    answer = [*ids, *b"|STOP|"]
    text, stopped_at = expected(answer, ["STOP"])
    assert assemble([[*answer, *garbage]], ["STOP"]) == (text, stopped_at)
    assert assemble([answer, garbage], ["STOP"]) == (text, stopped_at)


@given(ids=ids_with_matches, stop=stops.filter(bool))
def test_no_part_of_a_stop_string_is_shown_before_it_is_certain(ids: list[int], stop: list[str]) -> None:
    """At every moment the shown text is a beginning of the final text. Mutation seen to fail: nothing held."""
    final, _ = expected(ids, stop)
    assembler = Assembler(detokenizer(), stop)
    shown = ""
    for token_id in ids:
        shown += assembler.feed([token_id]).text
        assert final.startswith(shown)


def test_only_what_may_become_a_stop_string_is_held() -> None:
    """Mutation seen to fail: holding back as many characters as the longest stop string has."""
    assembler = Assembler(detokenizer(), ["###", "END"])
    assert assembler.feed(b"text").text == "text"
    assert assembler.feed(b"#").text == ""
    assert assembler.feed(b"#E").text == "##"
    assert assembler.feed(b"N").text == ""
    assert assembler.feed(b"x").text == "ENx"
    assert assembler.finish() == ""


def test_held_text_is_shown_when_the_answer_ends() -> None:
    assembler = Assembler(detokenizer(), ["STOP"])
    assert assembler.feed(b"go STO").text == "go "
    assert assembler.finish() == "STO"
    assert assembler.finish() == ""


def test_an_incomplete_character_is_dropped_at_the_end() -> None:
    assembler = Assembler(detokenizer(), [])
    assert assembler.feed("né".encode()[:2]).text == "n"
    assert assembler.finish() == ""


def test_the_id_that_completes_a_stop_string_is_counted_and_the_frame_s_rest_is_not() -> None:
    assembler = Assembler(detokenizer(), ["STOP"])
    assert assembler.feed([97, SPECIAL]).stopped_at is None
    piece = assembler.feed([258, 259, 97, 97])
    assert (piece.text, piece.stopped_at) == ("", 4)
    assert (assembler.feed([97]).text, assembler.finish()) == ("", "")


def test_of_two_stop_strings_the_first_to_complete_wins_and_of_a_tie_the_longer() -> None:
    assert assemble([b"xabc"], ["abc", "ab"]) == ("x", 3)
    assert assemble([b"xabc"], ["bc", "abc"]) == ("x", 4)
    assert assemble([b"aab"], ["aab", "ab"]) == ("", 3)


def test_a_stop_string_inside_one_fragment_ends_the_text_within_it() -> None:
    assert assemble([[97, 259]], ["P a"]) == ("aO", 2)


@pytest.mark.parametrize(
    "text",
    [FAMILY, "\U0001f3f3\ufe0f\u200d\U0001f308", "\U0001f44d\U0001f3fd", "\U0001f1eb\U0001f1f7", "1\ufe0f\u20e3",
     "e\u0301\u0323", "漢字かな", "한국어", "नमस्ते", "Z\u0337\u0351"],
)  # fmt: skip
@pytest.mark.parametrize("stop", [[], ["STOP"], ["\u200d!"]])
def test_characters_come_out_whole_over_every_frame_border_and_over_a_failover(text: str, stop: list[str]) -> None:
    """A seam is a border like any other: ids held back as half a character have been delivered, and the next
    attempt goes on behind them. Mutation seen to fail: a new detokenizer at the border.
    """
    ids = f"<{text}>".encode()
    for border in range(len(ids) + 1):
        assembler = Assembler(detokenizer(), stop)
        first, second = assembler.feed(ids[:border]).text, assembler.feed(ids[border:]).text
        assert first + second + assembler.finish() == f"<{text}>"
        assert "\ufffd" not in first + second


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Assembler(detokenizer(), ["a", ""])


def test_a_stop_string_that_overlaps_itself_is_found() -> None:
    assert assemble([b"aabaabaaab"], ["aabaaa"]) == ("aab", 9)
    assert assemble([b"abababc"], ["ababc"]) == ("ab", 7)
