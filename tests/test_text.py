"""Streaming text: whole characters, no part of a stop string, nothing lost, equal to decoding all
at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrive_jax.text import TextStream, check_stop_strings, first_stop


@dataclass
class Bytes:
    """A tokenizer whose tokens are the given byte strings, and which counts what it is asked."""

    pieces: list[bytes]
    drops_first_space: bool = False
    asked: list[int] = field(default_factory=list)

    def piece(self, token_id: int) -> bytes:
        self.asked.append(token_id)
        return self.pieces[token_id]

    def decode(self) -> str:
        raw = b"".join(self.pieces)
        return (raw.removeprefix(b" ") if self.drops_first_space else raw).decode(
            "utf-8", "replace"
        )


def run(tokenizer: Bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    stream = TextStream(tokenizer, stop)
    parts = []
    for token_id in range(len(tokenizer.pieces)):
        parts.append(stream.feed(token_id))
        if stream.stopped:
            break
    parts.append(stream.finish())
    return parts, stream.stop_string


def test_a_character_waits_for_its_last_byte() -> None:
    face = "😀".encode()
    parts, _ = run(Bytes([b"a", face[:1], face[1:3], face[3:], b"b"]))
    assert parts == ["a", "", "", "😀", "b", ""]


def test_a_broken_character_is_replaced_when_its_end_is_clear() -> None:
    parts, _ = run(Bytes([b"a\xe6\x97", b"b", b"\xf0\x9f"]))
    assert parts == ["a", "\ufffdb", "", "\ufffd"]


def test_the_text_of_the_last_token_is_not_lost() -> None:
    parts, met = run(Bytes([b"the e", b"nd"]), ("ending",))
    assert parts == ["the ", "", "end"]
    assert met is None


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "met"),
    [
        ([b"one STOP two"], ("STOP",), "one ", "STOP"),
        ([b"one S", b"TO", b"P two"], ("STOP",), "one ", "STOP"),
        ([b"one S", b"TO", b"Ping"], ("STOP!",), "one STOPing", None),
        ([b"aab"], ("ab",), "a", "ab"),
        ([b"a", b"a", b"b"], ("ab",), "a", "ab"),
        ([b"x\n", b"\n", b"y"], ("\n\n",), "x", "\n\n"),
        ([b"STOP"], ("STOP",), "", "STOP"),
        # Complete first wins, however the text is cut; at one end the longest.
        ([b"abcd"], ("abcd", "bc"), "a", "bc"),
        ([b"a", b"b", b"c", b"d"], ("abcd", "bc"), "a", "bc"),
        ([b"abc"], ("bc", "abc"), "", "abc"),
        (["日本".encode()[:4], "日本".encode()[4:], b"!"], ("本",), "日", "本"),
        ([b"\xe6", b"!"], ("\ufffd",), "", "\ufffd"),
    ],
)
def test_stop_strings(
    pieces: list[bytes], stop: tuple[str, ...], text: str, met: str | None
) -> None:
    parts, found = run(Bytes(pieces), stop)
    assert ("".join(parts), found) == (text, met)


def test_a_stop_string_met_by_the_flush_ends_the_text() -> None:
    parts, met = run(Bytes([b"a\xe6"]), ("\ufffd",))
    assert ("".join(parts), met) == ("a", "\ufffd")


def test_no_text_after_a_stop_string_and_no_token_after_the_end() -> None:
    stream = TextStream(Bytes([b"xSTOPy", b"z"]), ["STOP"])
    assert stream.feed(0) == "x"
    assert stream.feed(1) == ""
    assert stream.finish() == ""
    assert stream.finish() == ""
    with pytest.raises(RuntimeError, match="after finish"):
        stream.feed(1)


def test_first_space_is_dropped_once_where_the_tokenizer_puts_one() -> None:
    parts, _ = run(Bytes([b"", b" a", b" b"], drops_first_space=True))
    assert parts == ["", "a", " b", ""]


@pytest.mark.parametrize("stop", [[""], ["a", ""]])
def test_an_empty_stop_string_is_refused(stop: list[str]) -> None:
    with pytest.raises(ValueError, match="stop: expected non-empty strings, got ''"):
        TextStream(Bytes([]), stop)


def test_one_string_in_place_of_several_is_refused() -> None:
    with pytest.raises(ValueError, match="the string 'abc'"):
        check_stop_strings("abc")


# Few letters, so that stop strings are met and nearly met; some are several bytes long, and some
# bytes are broken.
TEXTS = st.text("ab\n 日😀", max_size=24).map(str.encode)
RAW = st.one_of(
    TEXTS,
    st.lists(st.sampled_from([b"a", b"b", b"\xe6", b"\x97", b"\xf0\x9f", b" "])).map(b"".join),
)


@settings(max_examples=300, deadline=None)
@given(
    raw=RAW,
    cuts=st.lists(st.integers(0, 60)),
    stop=st.lists(st.text("ab\n 日", min_size=1, max_size=4), max_size=3),
    space=st.booleans(),
)
def test_stream_is_the_whole_text_up_to_the_first_stop_string(
    raw: bytes, cuts: list[int], stop: list[str], space: bool
) -> None:
    ends = sorted({cut for cut in cuts if cut < len(raw)} | {len(raw)})
    pieces = [raw[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    tokenizer = Bytes(pieces, drops_first_space=space)
    whole = tokenizer.decode()
    found = first_stop(whole, stop)

    parts, met = run(tokenizer, tuple(stop))

    assert "".join(parts) == (whole if found is None else whole[: found[0]])
    assert met == (None if found is None else found[1])
    # What has been shown is never taken back: no stop string began in it and went on.
    shown = ""
    for part in parts:
        shown += part
        assert not any(s in shown for s in stop)
    assert len(tokenizer.asked) <= len(pieces)
