"""Prefix trees: rows that start with the same tokens share the nodes of that prefix.

Rows "1 2 3" and "1 2 4" become four nodes 1 2 3 4 instead of six tokens; each node goes through the
model once, at the position it has in its row, and attends to its ancestors only. So the hidden
states, and by the chain rule the gradients, are those of the separate rows. Without sharing, every
row is a tree of its own: one layout serves both. Knows token ids only, no tensors, no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Nodes ``start:end``, each the parent of the next, below the ``ancestors`` (root first).

    Ancestors are indices of other segments; every token of theirs is seen by every token here.
    """

    start: int
    end: int
    ancestors: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Some rows as prefix trees, laid out one segment after the other.

    ``nodes[i][p]`` is the node of token ``p`` of row ``rows[i]``. Segments cover all nodes.
    """

    rows: tuple[int, ...]
    nodes: tuple[IntArray, ...]
    token_ids: IntArray  # [N]
    positions: IntArray  # [N] distance from the root
    segments: tuple[Segment, ...]

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)


def plant(rows: Sequence[IntArray], *, max_tokens: int, share_prefixes: bool) -> list[Forest]:
    """Split the rows into forests of at most ``max_tokens`` nodes; one longer row stands alone.

    With sharing, rows are sorted by their tokens, which puts common prefixes side by side; a tree
    is divided only if it does not fit as a whole. Deterministic.
    """
    order = list(range(len(rows)))
    if share_prefixes:
        # Big-endian bytes of non-negative integers sort like the integers, prefixes first.
        order.sort(key=lambda row: rows[row].astype(">i8").tobytes())
    shared = [0] * len(order)
    if share_prefixes:
        for i, (left, right) in enumerate(pairwise(order), start=1):
            shared[i] = common_prefix(rows[left], rows[right])
    forests = []
    for part in _divide([len(rows[row]) for row in order], shared, max_tokens):
        chosen = [order[i] for i in part]
        forests.append(_grow(chosen, [rows[row] for row in chosen], [shared[i] for i in part]))
    return forests


def common_prefix(left: IntArray, right: IntArray) -> int:
    size = min(len(left), len(right))
    differs = np.flatnonzero(left[:size] != right[:size])
    return int(differs[0]) if len(differs) else size


def _divide(lengths: list[int], shared: list[int], max_tokens: int) -> list[range]:
    """Consecutive rows for each forest; ``shared[i]`` tokens of row i stand in row i-1 already."""
    parts = []
    start = used = 0
    for i, length in enumerate(lengths):
        tree = _tree_tokens(lengths, shared, i) if shared[i] == 0 else 0
        needed = tree if tree <= max_tokens and shared[i] == 0 else length - shared[i]
        if used and used + needed > max_tokens:
            parts.append(range(start, i))
            start, used = i, length
        else:
            used += length - shared[i]
    if lengths:
        parts.append(range(start, len(lengths)))
    return parts


def _tree_tokens(lengths: list[int], shared: list[int], first: int) -> int:
    total = lengths[first]
    for i in range(first + 1, len(lengths)):
        if shared[i] == 0:
            break
        total += lengths[i] - shared[i]
    return total


@dataclass(slots=True)
class _Chain:
    """The nodes that one row adds, from ``depth`` on; ``cuts``: depths where others branch off."""

    depth: int
    size: int
    parent: int
    cuts: set[int]


def _grow(rows: list[int], tokens: list[IntArray], shared: list[int]) -> Forest:
    """Merge sorted rows. Example: "1 2 3", "1 2 4" -> chains "1 2 3" (cut at depth 2) and "4"."""
    chains: list[_Chain] = []
    path: list[int] = []  # the chains from the root to the end of the last row
    nodes: list[IntArray] = []
    num_nodes = 0
    for i, row in enumerate(tokens):
        depth = shared[i] if i else 0
        while path and chains[path[-1]].depth >= depth:
            path.pop()
        added = np.arange(num_nodes, num_nodes + len(row) - depth, dtype=np.int64)
        nodes.append(np.concatenate([nodes[-1][:depth], added]) if depth else added)
        if len(added):
            parent = path[-1] if path else -1
            if path:
                chains[parent].cuts.add(depth)
            path.append(len(chains))
            chains.append(_Chain(depth, len(added), parent, set()))
            num_nodes += len(added)
    token_ids = np.empty(num_nodes, dtype=np.int64)
    positions = np.empty(num_nodes, dtype=np.int64)
    for row, place in zip(tokens, nodes, strict=True):
        token_ids[place] = row
        positions[place] = np.arange(len(row))
    return Forest(
        rows=tuple(rows),
        nodes=tuple(nodes),
        token_ids=token_ids,
        positions=positions,
        segments=_segments(chains),
    )


def _segments(chains: list[_Chain]) -> tuple[Segment, ...]:
    """Cut the chains where others branch off; a segment that only goes on its parent joins it."""
    pieces: list[tuple[int, int]] = []  # (parent piece or -1, number of tokens)
    piece_at: dict[tuple[int, int], int] = {}  # (chain, depth of the end) -> piece
    for number, chain in enumerate(chains):
        end = chain.depth + chain.size
        above = piece_at[chain.parent, chain.depth] if chain.parent >= 0 else -1
        for low, high in pairwise([chain.depth, *sorted(chain.cuts - {end}), end]):
            pieces.append((above, high - low))
            above = piece_at[number, high] = len(pieces) - 1
    num_children = [0] * len(pieces)
    for parent, _ in pieces:
        if parent >= 0:
            num_children[parent] += 1
    segments: list[Segment] = []
    segment_of: list[int] = []
    start = 0
    for number, (parent, size) in enumerate(pieces):
        if parent >= 0 and parent == number - 1 and num_children[parent] == 1:
            last = segments[-1]
            segments[-1] = Segment(start=last.start, end=start + size, ancestors=last.ancestors)
        else:
            above = segment_of[parent] if parent >= 0 else -1
            ancestors = (*segments[above].ancestors, above) if above >= 0 else ()
            segments.append(Segment(start=start, end=start + size, ancestors=ancestors))
        segment_of.append(len(segments) - 1)
        start += size
    return tuple(segments)
