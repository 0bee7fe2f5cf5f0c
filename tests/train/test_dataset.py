from __future__ import annotations

import itertools
import re
from collections import namedtuple
from dataclasses import make_dataclass
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from agent_rl.errors import DatasetError
from agent_rl.train import dataset
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


class MapStyle:
    """Rows for every index, as a torch dataset that leaves the bounds to its sampler."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, int]:
        if index > 5:
            raise IndexError(index)
        return {"index": index}


class Endless(MapStyle):
    def __getitem__(self, index: int) -> dict[str, int]:
        return {"index": index}


def test_a_map_style_dataset_is_read_by_its_length() -> None:
    assert load_rows(Endless(3)) == [{"index": 0}, {"index": 1}, {"index": 2}]
    with pytest.raises(DatasetError, match="MapStyle says that it has 9 rows, and row 6 is not"):
        load_rows(MapStyle(9))


def test_a_source_without_length_has_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "_MAX_UNCOUNTED", 3)
    assert len(load_rows({"i": i} for i in range(3))) == 3
    with pytest.raises(DatasetError, match="did not end after 3 rows"):
        load_rows({"i": i} for i in itertools.count())


def test_what_is_no_dataset_is_told_the_kinds_that_are() -> None:
    with pytest.raises(DatasetError, match=r"mapping with the keys 'train'; give .* split of it"):
        load_rows({"train": [{"q": 1}]})
    with pytest.raises(DatasetError, match=r"of type int is no dataset; give a list .* map-style"):
        load_rows(3)  # type: ignore[arg-type]
    with pytest.raises(DatasetError, match=r"row 0 .* is a list, not a dict; give a list"):
        load_rows([[1, 2]])  # type: ignore[list-item]


def test_rows_that_are_nearly_dicts_are_told_how_to_become_some() -> None:
    class Model:
        def model_dump(self) -> dict[str, int]:
            return {"q": 1}

    Named = namedtuple("Named", "q")
    Data = make_dataclass("Data", ["q"])
    for row, call in ((Model(), "row.model_dump()"), (Named(1), "row._asdict()")):
        with pytest.raises(DatasetError, match=re.escape(f"write [{call} for row in rows]")):
            load_rows([row])  # type: ignore[list-item]
    with pytest.raises(DatasetError, match=r"write \[dataclasses.asdict\(row\) for"):
        load_rows([Data(1)])


def test_a_loader_of_batches_is_no_dataset() -> None:
    """Its rows would be whole batches: {"q": ["a", "b"]}."""
    loader = DataLoader([{"q": "a"}, {"q": "b"}], batch_size=2)
    with pytest.raises(DatasetError, match=r"DataLoader gives out batches.* loader\.dataset"):
        load_rows(loader)


def test_a_byte_order_mark_is_not_part_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"q": "a"}\n', encoding="utf-8")
    assert load_rows(path) == [{"q": "a"}]
