"""Template text to ids: what a tokenizer is never given."""

from __future__ import annotations

from typing import Any

from families import family_tokenizer

from agent_rl.tokens.vocabulary import Vocabulary


def test_half_of_a_surrogate_pair_is_the_replacement_character(smollm: Any) -> None:
    """Arguments '{"q": "\\\\ud83d"}' become such text in a template that prints mappings."""
    for tokenizer in (smollm, family_tokenizer("qwen3")):
        vocabulary = Vocabulary(tokenizer)
        assert vocabulary.encode("a\ud83db") == vocabulary.encode("a\ufffdb")
        assert vocabulary.encode("\ud83d\ude42") == vocabulary.encode("🙂")
