"""Stop strings: whether the text of a completion has just come to contain one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens before the first one that the stop string can begin in: a window that starts inside a
# character, or where the tokenizer drops a leading space, does not matter then.
_SLACK = 8


def ends_with_stop(
    token_ids: Sequence[int],
    num_prompt: int,
    stop: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
) -> bool:
    """Asked after each token, so only a match that ends inside the last token can be new.

    A token is at least one byte of text: "END" reaches back 3 tokens at most.
    """
    num_bytes = max(len(text.encode()) for text in stop)
    window = list(token_ids[max(num_prompt, len(token_ids) - num_bytes - _SLACK) :])
    text = tokenizer.decode(window, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(end in text for end in stop)
