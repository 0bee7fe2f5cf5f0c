"""Prefix trees: unique tokens, segments and their ancestors, division by a token budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.train.tree import Forest, Segment, plant


def forests(
    rows: list[list[int]], max_tokens: int = 1000, share_prefixes: bool = True
) -> list[Forest]:
    arrays = [np.array(row, dtype=np.int64) for row in rows]
    return plant(arrays, max_tokens=max_tokens, share_prefixes=share_prefixes)


def visible(forest: Forest) -> list[set[int]]:
    """For each node the nodes it attends to, by the segments."""
    result: list[set[int]] = []
    for segment in forest.segments:
        above = {
            node
            for a in segment.ancestors
            for node in range(forest.segments[a].start, forest.segments[a].end)
        }
        for node in range(segment.start, segment.end):
            result.append(above | set(range(segment.start, node + 1)))
    return result


def test_two_rows_share_their_prefix() -> None:
    (forest,) = forests([[1, 2, 3], [1, 2, 4, 5]])
    assert forest.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert forest.positions.tolist() == [0, 1, 2, 2, 3]
    assert [nodes.tolist() for nodes in forest.nodes] == [[0, 1, 2], [0, 1, 3, 4]]
    assert forest.segments == (
        Segment(start=0, end=2),
        Segment(start=2, end=3, ancestors=(0,)),
        Segment(start=3, end=5, ancestors=(0,)),
    )


def test_rows_that_extend_each_other_are_one_segment() -> None:
    """Turns of one conversation: 1 2, 1 2 3 4, 1 2 3 4 5 6 cost six tokens and plain causality."""
    (forest,) = forests([[1, 2, 3, 4, 5, 6], [1, 2], [1, 2, 3, 4]])
    assert forest.rows == (1, 2, 0)
    assert forest.segments == (Segment(start=0, end=6),)


def test_equal_rows_cost_nothing_more() -> None:
    (forest,) = forests([[1, 2], [1, 2], [1, 2, 3]])
    assert forest.num_nodes == 3
    assert [nodes.tolist() for nodes in forest.nodes] == [[0, 1], [0, 1], [0, 1, 2]]


def test_branch_in_the_middle_of_an_older_chain() -> None:
    """1 2 3 4 | 1 2 3 5 | 1 6: the first chain is cut at depth 1 and at depth 3."""
    (forest,) = forests([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6]])
    assert forest.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert [(s.start, s.end, s.ancestors) for s in forest.segments] == [
        (0, 1, ()),
        (1, 3, (0,)),
        (3, 4, (0, 1)),
        (4, 5, (0, 1)),
        (5, 6, (0,)),
    ]


def test_without_sharing_rows_stand_in_their_order() -> None:
    (forest,) = forests([[1, 2], [1, 2], [0]], share_prefixes=False)
    assert forest.rows == (0, 1, 2)
    assert forest.token_ids.tolist() == [1, 2, 1, 2, 0]
    assert [(s.start, s.end) for s in forest.segments] == [(0, 2), (2, 4), (4, 5)]


def test_a_tree_that_fits_is_not_divided() -> None:
    """Trees of 3 and 4 nodes under a budget of 5: two forests, not 3 + 2 and 2 more."""
    got = forests([[1, 2], [1, 3], [5, 6, 7], [5, 6, 8]], max_tokens=5)
    assert [forest.rows for forest in got] == [(0, 1), (2, 3)]


def test_a_tree_that_does_not_fit_is_divided_by_rows() -> None:
    got = forests([[1, 2, 3], [1, 2, 4], [1, 2, 5]], max_tokens=4)
    assert [forest.num_nodes for forest in got] == [4, 3]


def test_a_row_above_the_budget_stands_alone() -> None:
    got = forests([[1, 2, 3, 4], [9]], max_tokens=2)
    assert [forest.num_nodes for forest in got] == [4, 1]


def test_no_rows() -> None:
    assert forests([]) == []


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_large_token_ids_sort_like_numbers(share_prefixes: bool) -> None:
    (forest,) = forests([[300, 1], [2, 1], [70000]], share_prefixes=share_prefixes)
    assert forest.rows == ((1, 0, 2) if share_prefixes else (0, 1, 2))


rows_strategy = st.lists(
    st.lists(st.integers(1, 3), min_size=1, max_size=7), min_size=1, max_size=8
)


@settings(deadline=None, max_examples=150)
@given(rows=rows_strategy, max_tokens=st.integers(1, 20), share_prefixes=st.booleans())
def test_every_token_sees_exactly_its_own_past(
    rows: list[list[int]], max_tokens: int, share_prefixes: bool
) -> None:
    """For any rows: each once, its nodes spell it, and token p attends to nodes 0..p of its row."""
    got = forests(rows, max_tokens, share_prefixes)
    assert sorted(row for forest in got for row in forest.rows) == list(range(len(rows)))
    for forest in got:
        seen = visible(forest)
        assert len(seen) == forest.num_nodes
        assert forest.num_nodes <= max(max_tokens, max(len(rows[row]) for row in forest.rows))
        for row, nodes in zip(forest.rows, forest.nodes, strict=True):
            path = nodes.tolist()
            assert forest.token_ids[nodes].tolist() == rows[row]
            assert forest.positions[nodes].tolist() == list(range(len(path)))
            assert all(seen[node] == set(path[: p + 1]) for p, node in enumerate(path))


@settings(deadline=None, max_examples=50)
@given(rows=rows_strategy)
def test_node_count_is_that_of_a_trie(rows: list[list[int]]) -> None:
    prefixes = {tuple(row[:i]) for row in rows for i in range(1, len(row) + 1)}
    assert sum(forest.num_nodes for forest in forests(rows)) == len(prefixes)
