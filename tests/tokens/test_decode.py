"""Detokenizer: growing text without half characters, markers told from look-alikes."""

from __future__ import annotations

from typing import Any

import pytest
from families import family_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.tokens.decode import Detokenizer, partial_length
from agent_rl.tokens.format import ChatFormat
from agent_rl.tokens.vocabulary import Vocabulary


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    shown = []
    for token_id in ids:
        before = len(detokenizer.text)
        detokenizer.feed([token_id])
        shown.append(detokenizer.text[before:])
    return shown


def test_an_emoji_over_two_tokens_is_shown_whole(fix: Any) -> None:
    """Case B54: nothing after its first half, and no replacement character in any chunk."""
    assert pieces(Detokenizer(Vocabulary(fix()), (), [2]), [20, 70, 71, 2]) == ["a", "", "🙂", ""]


def test_half_an_emoji_at_the_end_is_not_shown(fix: Any) -> None:
    """Case B54: cut by length, the content is "a"."""
    assert ChatFormat.of(fix()).parse([20, 70], stop_reason="length").content == "a"


def test_a_marker_is_its_own_token(fix: Any) -> None:
    """The same text spelled by other tokens is text."""
    tokenizer = fix()
    spelled = tokenizer.encode("<") + tokenizer.encode("/think>")
    assert tokenizer.decode(spelled) == "</think>"
    detokenizer = Detokenizer(Vocabulary(tokenizer), ("</think>",), [])
    detokenizer.feed([*spelled, 20, 9])
    assert detokenizer.text == "</think>a</think>"
    assert detokenizer.find("</think>", 0) == 9


def test_hidden_tokens_have_no_text(fix: Any) -> None:
    detokenizer = Detokenizer(Vocabulary(fix()), (), [24])
    detokenizer.feed([20, 1, 24, 21, 2, 0])
    assert detokenizer.text == "ab"


def test_partial_length_is_the_longest_beginning() -> None:
    assert partial_length("a <to", "<tool_call>", 5) == 3
    assert partial_length("a <too>", "<tool_call>", 7) == 0
    assert partial_length("aaEE", "EEN", 4) == 2
    assert partial_length("END", "END", 3) == 0


@pytest.mark.parametrize("has_pieces", [False, True])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_text_does_not_depend_on_how_ids_are_fed(has_pieces: bool, data: st.DataObject) -> None:
    """Random bytes, merges and special tokens: one by one equals all at once."""
    tokenizer = family_tokenizer("qwen3", has_pieces=has_pieces)
    vocabulary = Vocabulary(tokenizer)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    whole = Detokenizer(vocabulary, ("<think>", "</think>"), [])
    whole.feed(ids)
    whole.finish()
    single = Detokenizer(vocabulary, ("<think>", "</think>"), [])
    pieces(single, ids)
    single.finish()
    assert single.text == whole.text
    assert single.find("</think>", 0) == whole.find("</think>", 0)


def test_pieces_keep_the_space_before_a_word() -> None:
    """A SentencePiece decoder drops the first space of a text, not that of each chunk."""
    tokenizer = family_tokenizer("mistral_7", has_pieces=True)
    ids = tokenizer.encode("the dog 🙂 said", add_special_tokens=False)
    shown = pieces(Detokenizer(Vocabulary(tokenizer), (), []), ids)
    assert "".join(shown) == "the dog 🙂 said"
    assert [piece for piece in shown if piece] == ["the", " dog", " ", "🙂", " said"]


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_pieces_of_a_real_tokenizer_join_to_its_text(smollm: Any, text: str) -> None:
    """Piece by piece as at once; what may still become a character is not shown at the end."""
    ids = smollm.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(Vocabulary(smollm), (), [])
    pieces(detokenizer, ids)
    detokenizer.finish()
    assert detokenizer.text == smollm.decode(ids).rstrip("\ufffd")
