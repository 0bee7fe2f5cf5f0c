"""A tokenizer seen as what the rest needs: text <-> ids, and which ids are boundaries.

A boundary is an added token (``<|im_end|>``, ``</think>``): the tokenizer splits text there before
anything else, so text that starts with one is encoded alone exactly as inside a longer text.
Works with any Hugging Face tokenizer and with a small object that has ``encode``, ``decode`` and
``eos_token_id`` (its ``all_special_ids`` are then the boundaries). Knows nothing of messages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from agent_rl.errors import WrongTypeError, shown

CONTEXT = 8
"""Ids before a text that decide how its first token is decoded."""
_END_NAMES = frozenset(
    {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "</s>", "<eos>"}
)
"""A pad token with one of these texts also ends a text; any other one is only filler."""


class Tokenizer(Protocol):
    """The least a tokenizer must offer; a chat template comes on top (``render.ChatTemplate``)."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Sequence[int]: ...

    def decode(self, token_ids: Sequence[int], /) -> str: ...


def require_tokenizer(value: object) -> None:
    """Raises WrongTypeError for the path of a tokenizer, or None."""
    if value is not None and not isinstance(value, str | Path):
        return
    path = repr(str(value)) if isinstance(value, str | Path) else "model_path"
    raise WrongTypeError(
        f"the tokenizer is {shown(value)}; load one: "
        f"transformers.AutoTokenizer.from_pretrained({path})"
    )


class Vocabulary:
    """Encodes template text (never model output) and decodes ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rust = _rust_of(tokenizer)
        added = dict(getattr(tokenizer, "added_tokens_decoder", None) or {})
        named = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
        special = {*(getattr(tokenizer, "all_special_ids", None) or ()), *named} - {None}
        special |= {id for id, token in added.items() if getattr(token, "special", True)}
        self.special: frozenset[int] = frozenset(special)
        self.boundaries: frozenset[int] = self.special | frozenset(added)
        self.eos_id: int | None = named[1]
        self.pad_id: int | None = named[2]
        # Hugging Face may tidy spaces while decoding, which would make the text of a prefix differ
        # from the prefix of the text.
        is_tidying = hasattr(tokenizer, "clean_up_tokenization_spaces")
        self._options: dict[str, Any] = (
            {"clean_up_tokenization_spaces": False} if is_tidying else {}
        )
        texts = {id: getattr(token, "content", None) for id, token in added.items()}
        self._texts = {id: texts.get(id) or self.decode([id]) for id in self.boundaries}
        self._ids = {text: id for id, text in self._texts.items()}

    def encode(self, text: str) -> list[int]:
        """Half of a surrogate pair, which JSON escapes can spell, is encoded as U+FFFD."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        rust = self._rust
        # Somebody's call of the tokenizer may have left it padding, cutting or splitting marks.
        if rust and not (rust.padding or rust.truncation or rust.encode_special_tokens):
            return list(rust.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        if self._rust is not None:
            return str(self._rust.decode(token_ids, skip_special_tokens=False))
        return str(self._tokenizer.decode(list(token_ids), **self._options))

    def text_behind(self, before: Sequence[int], token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` add to that of ``before``.

        "▁the" alone decodes to "the", behind "a" to " the". Only behind a mark that the tokenizer
        itself writes a space after, as Llama 2's does, is the space none of the text.
        """
        tail = before[-CONTEXT:]
        text = self.decode([*tail, *token_ids])[len(self.decode(tail)) :]
        return text.removeprefix(" ") if self.is_spaced_after(before) else text

    def is_spaced_after(self, before: Sequence[int]) -> bool:
        """Whether text behind these ids is encoded with a space in front that it does not have."""
        return len(before) > 0 and before[-1] in self.boundaries and self._spaces_marks

    @cached_property
    def _spaces_marks(self) -> bool:
        mark = next(iter(self._ids), None)
        if mark is None:
            return False
        ids = self.encode(f"{mark}a")
        return ids[0] == self._ids[mark] and self.decode(ids) == f"{mark} a"

    def text_of(self, token_id: int) -> str:
        """The text of one token."""
        return self._texts.get(token_id) or self.decode([token_id])

    def id_of(self, text: str) -> int | None:
        """The boundary token with exactly this text, None where the text is spelled by others."""
        return self._ids.get(text)

    @cached_property
    def longest(self) -> int:
        """How many characters of a text one token stands for at most.

        Unicode normalisation, where a tokenizer does it, can make one character of several.
        """
        vocab = getattr(self._tokenizer, "get_vocab", None)
        if vocab is None:
            return sys.maxsize
        is_as_written = self._rust is not None and self._rust.normalizer is None
        return (1 if is_as_written else 4) * max(map(len, vocab()), default=1)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Tokens ``<0x0A>`` of a SentencePiece vocabulary: bytes of what it has no piece for."""
        convert = getattr(self._tokenizer, "convert_tokens_to_ids", None)
        if convert is None:
            return frozenset()
        ids = convert([f"<0x{byte:02X}>" for byte in range(256)])
        return frozenset(ids) - {None, getattr(self._tokenizer, "unk_token_id", None)}

    @property
    def pad_is_end(self) -> bool:
        return self.pad_id is not None and self.text_of(self.pad_id) in _END_NAMES


def _rust_of(tokenizer: Tokenizer) -> Any | None:
    """The `tokenizers` object in a fast tokenizer, where transformers' own methods stand around it.

    Their handling of arguments costs several times the work itself, and it sets state that threads
    share ("Already borrowed"). A class with methods of its own is asked through them.
    """
    methods = [
        getattr(type(tokenizer), name, None)
        for name in ("encode", "_encode_plus", "_batch_encode_plus", "decode", "_decode")
    ]
    modules = {method.__module__ for method in methods if method is not None}
    if not all(name.startswith("transformers.tokenization_utils") for name in modules):
        return None
    return getattr(tokenizer, "backend_tokenizer", None)
