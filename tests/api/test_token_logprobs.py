"""Log-prob entries: text, exact bytes, alternatives."""

from __future__ import annotations

from typing import Any

from agent_rl.api.logprobs import entries, token_text


class Vocabulary:
    """Byte-level BPE of three tokens: "hi", and the two halves of 🙂 (F0 9F | 99 82)."""

    spelling = ("hi", "ðŁ", "ĻĤ", "<0xF0>", "?")
    raw = (b"hi", b"\xf0\x9f", b"\x99\x82", b"\xf0", b"\xff")

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.spelling[token_id]

    @property
    def tokenizer(self) -> Any:
        return self

    def decode(self, token_ids: list[int]) -> str:
        return b"".join(self.raw[i] for i in token_ids).decode(errors="replace")


FORMAT: Any = Vocabulary()


def test_entries_have_text_bytes_and_alternatives() -> None:
    tops = [[(0, -0.5), (1, -1.5)]]
    assert entries(FORMAT, [0], [-0.5], tops) == [
        {
            "token": "hi",
            "logprob": -0.5,
            "bytes": [104, 105],
            "top_logprobs": [
                {"token": "hi", "logprob": -0.5, "bytes": [104, 105]},
                {"token": "bytes:\\xf0\\x9f", "logprob": -1.5, "bytes": [0xF0, 0x9F]},
            ],
        }
    ]
    assert entries(FORMAT, [0], [-0.5])[0]["top_logprobs"] == []


def test_bytes_of_half_characters_join_to_the_character() -> None:
    raw = [byte for i in (1, 2) for byte in token_text(FORMAT, i)[1] or ()]
    assert bytes(raw).decode() == "🙂"
    assert token_text(FORMAT, 3) == ("bytes:\\xf0", [0xF0])


def test_unknown_spelling_has_no_bytes() -> None:
    class Sentence(Vocabulary):
        spelling = ("", "", "", "", "☃")

    assert token_text(Sentence(), 4) == ("\ufffd", None)  # type: ignore[arg-type]
