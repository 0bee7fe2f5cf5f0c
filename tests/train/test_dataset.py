from __future__ import annotations

from pathlib import Path

import pytest

from agent_rl.errors import DatasetError
from agent_rl.train.dataset import load_rows


def test_jsonl_is_split_at_newlines_only(tmp_path: Path) -> None:
    """Case B168: U+2028 inside a string does not tear the row."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "a\u2028b"}\n\n{"q": "c"}\n', encoding="utf-8")
    assert load_rows(path) == [{"q": "a\u2028b"}, {"q": "c"}]


def test_sequences_are_copied_row_by_row() -> None:
    rows = [{"q": 1}]
    loaded = load_rows(rows)
    assert loaded == rows and loaded[0] is not rows[0]


def test_faults_name_the_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": 1}\n{"q": \n')
    with pytest.raises(DatasetError, match="line 2: not valid JSON"):
        load_rows(path)
    with pytest.raises(DatasetError, match="does not exist"):
        load_rows(tmp_path / "none.jsonl")
    with pytest.raises(DatasetError, match=r"must end in \.jsonl"):
        load_rows(Path(__file__))
    with pytest.raises(DatasetError, match=r"row 1 .* is a str"):
        load_rows([{"q": 1}, "q"])  # type: ignore[list-item]
    with pytest.raises(DatasetError, match="no rows"):
        load_rows([])
