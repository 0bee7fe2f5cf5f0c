"""Stop strings over tokens of one or several letters."""

from __future__ import annotations

import pytest

from agent_rl.engine.stop_strings import ends_with_stop


class Pieces:
    """Ids are places in a list of pieces; like some real ones it drops a leading space."""

    pieces = ("a", " b", "END", "E", "ND", " END", "x")

    def decode(self, ids: list[int], **options: bool) -> str:
        return "".join(self.pieces[token_id] for token_id in ids).removeprefix(" ")


@pytest.mark.parametrize(
    ("ids", "stop", "expected"),
    [
        ([0, 2], ["END"], True),
        ([0, 3, 4], ["END"], True),
        ([0, 3], ["END"], False),
        ([0, 3, 4], ["zz", "ND"], True),
        ([0] * 20 + [5], [" END"], True),
        ([6, 6], ["xx"], True),
        ([0], ["xa"], False),  # the x belongs to the prompt
    ],
)
def test_ends_with_stop(ids: list[int], stop: list[str], expected: bool) -> None:
    prompt = [6, 6]
    assert ends_with_stop([*prompt, *ids], len(prompt), stop, Pieces()) is expected  # type: ignore[arg-type]
