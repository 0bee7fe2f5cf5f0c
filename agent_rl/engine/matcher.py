"""Guided decoding: which tokens the grammar of a completion lets come next.

A grammar is a text in llguidance's Lark dialect. Sets of tokens are integers, bit i speaks of
token i. Over the vocabulary a, b, ab, <end> with the bits 1, 2, 4, 8, ``start: "ab"`` allows

    at first: a, ab (5)     after a: b (2), which is forced     after ab: only <end> (8), finished

The optional package ``llguidance`` keeps the state; nothing here knows logits or messages.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agent_rl.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

_MAX_CACHED = 32  # compiled grammars; agents send the same few again and again
_MAX_REASON = 300  # characters of a reason, which may quote the whole grammar


def can_guide(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether the package is installed and can read this tokenizer (a fast one)."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        return False
    try:
        importlib.import_module("llguidance")
    except ImportError:
        return False
    return True


class GrammarCompiler:
    """Makes the matchers of one engine, from any thread. Needs ``can_guide(tokenizer)``.

    What is known of the vocabulary takes 0.4 s to compute, which the first grammar pays.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], vocab_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = list(end_ids) or None
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._cached = functools.lru_cache(maxsize=_MAX_CACHED)(self._compile)

    def matcher(self, grammar: str, end_ids: Iterable[int]) -> Matcher:
        """``end_ids`` are those of the request; special tokens among them may follow a whole text.

        Raises:
            RequestError: the grammar is malformed, too large, or allows no token at all.
        """
        state = self._cached(grammar).deep_copy()
        vocabulary = self._known_vocabulary()
        turn_ends = [i for i in end_ids if vocabulary.is_special_token(i)]
        matcher = Matcher(
            state,
            end_set=_token_set(end_ids),
            turn_end_set=_token_set(turn_ends),
            vocab_size=self._vocab_size,
        )
        if matcher.is_finished:
            raise _refusal("it allows no token")
        return matcher

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        state = LLMatcher(self._known_vocabulary(), grammar, log_level=0)
        if state.is_error():
            raise _refusal(state.get_error())
        return state

    def _known_vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                from llguidance.hf import from_tokenizer

                # The rows of an embedding are often padded beyond the tokenizer's ids.
                num_ids = max(self._vocab_size, len(self._tokenizer))
                self._vocabulary = from_tokenizer(self._tokenizer, num_ids, self._end_ids)
            return self._vocabulary


class Matcher:
    """How far one completion has come in its grammar.

    It moves with the sampled tokens alone, so pauses and new weights do not concern it.
    """

    def __init__(
        self, state: LLMatcher, *, end_set: int, turn_end_set: int, vocab_size: int
    ) -> None:
        self._state = state
        self._end_set = end_set
        self._turn_end_set = turn_end_set
        self._vocabulary_set = (1 << vocab_size) - 1
        self._allowed = self._next_set()

    @property
    def is_finished(self) -> bool:
        """Nothing but the end of the turn can follow, so there is nothing left to sample."""
        return not self._allowed & ~self._turn_end_set

    def allowed(self, *, may_end: bool) -> int:
        """The set to sample from. Where only an end id fits the grammar, it may come too early."""
        unended = self._allowed & ~self._end_set
        return self._allowed if may_end or not unended else unended

    def advance(self, token_id: int) -> None:
        """Raises RequestError when the grammar turns out to be too complex to go on with."""
        self._state.consume_token(token_id)
        self._allowed = self._next_set()

    def _next_set(self) -> int:
        allowed = int.from_bytes(self._state.compute_bitmask(), "little") & self._vocabulary_set
        if self._state.is_accepting():
            allowed |= self._turn_end_set
        if self._state.is_error():
            raise _refusal(self._state.get_error())
        return allowed


def forbidden_tokens(
    allowed: dict[int, int], vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """{row of the batch: set} as the rows [R] and what each of them may not sample [R, V]."""
    num_bytes = -(-vocab_size // 8)
    packed = bytearray(b"".join(s.to_bytes(num_bytes, "little") for s in allowed.values()))
    bytes_RN = torch.frombuffer(packed, dtype=torch.uint8).view(-1, num_bytes).to(device)
    bits_8 = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
    is_forbidden_RV = ((bytes_RN[:, :, None] & bits_8) == 0).flatten(1)[:, :vocab_size]
    return torch.tensor(list(allowed), device=device), is_forbidden_RV


def _token_set(ids: Iterable[int]) -> int:
    """[0, 3] -> 0b1001."""
    return sum(1 << i for i in set(ids))


def _refusal(reason: str) -> RequestError:
    first_line = reason.partition("\n")[0][:_MAX_REASON]
    return RequestError(f"the grammar cannot be used: {first_line}", param="grammar")
