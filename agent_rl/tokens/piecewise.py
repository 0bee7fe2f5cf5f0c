"""A chat template rendered from one message on: what a longer conversation adds to its text.

Most templates are a head, one loop over the messages, and an end. Jinja keeps nothing from one turn
of a loop to the next, so the text of a message cannot change when others follow, unless the
template looks at them. ``Piecewise.of`` reads that off the syntax tree: a proof, not a trial.

    head(messages[0]) + body(m0) + body(m1) + ... + end        grows only between body and end

A template that counts its messages, scans them, changes a namespace in the loop or asks for the
date has no ``Piecewise``. Knows nothing of ids or of what the messages say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from agent_rl.types import JsonObject

_MESSAGES, _WATCHED = "messages", "qzx_watched"
_START, _OFFSET = "qzx_start", "qzx_offset"
_PURE_CALLS = frozenset({"raise_exception", "namespace", "range", "dict"})
_REFUSED = (
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
    nodes.Block,
    nodes.CallBlock,
    nodes.ExprStmt,
    nodes.ScopedEvalContextModifier,
)


class Piecewise:
    """``render(variables, k)`` gives the text from message ``k`` on.

    ``reach``: how many messages ahead the text of a message looks. ``needs``: how many messages
    there must be before ``start``, because the head looks at them.
    """

    def __init__(self, template: jinja2.Template, reach: int, needs: int) -> None:
        self._template = template
        self.reach = reach
        self.needs = needs

    @classmethod
    def of(cls, environment: jinja2.Environment, source: str) -> Piecewise | None:
        """None where the text of a message may depend on more than those just after it."""
        try:
            return _compiled(environment, source)
        except _NotLocalError:
            return None

    def render(self, variables: JsonObject, start: int) -> str | None:
        """The text of ``messages[start:]`` and the end; with ``start`` 0 the head too.

        None where a message looked at the last one by a negative index: then the next message
        may change it.
        """
        watched = _Watched(variables[_MESSAGES])
        text = self._template.render({**variables, _WATCHED: watched, _START: start})
        return None if watched.is_seen_from_behind else text


class _NotLocalError(Exception):
    """The text of a message may depend on messages far from it."""


class _Watched(list[Any]):
    """Messages that notice a negative index: ``messages[loop.index0 - 1]`` in the first turn."""

    is_seen_from_behind = False

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        if isinstance(index, int) and index < 0:
            self.is_seen_from_behind = True
        return super().__getitem__(index)


def _compiled(environment: jinja2.Environment, source: str) -> Piecewise:
    tree = environment.parse(source)
    place = _place_of_loop(tree.body)
    head, loop, end = tree.body[:place], tree.body[place], tree.body[place + 1 :]
    assert isinstance(loop, nodes.For) and isinstance(loop.iter, nodes.Name)
    alias = loop.iter.name
    macros = {node.name for node in head if isinstance(node, nodes.Macro)}
    outer = _assigned(head)
    reader = _Reader(alias=alias, macros=macros)
    for node in environment.parse(source).body[:place]:
        reader.check_head(node)
    inner = _assigned(loop.body)
    _check_namespaces(loop.body, inner - outer)
    loop.body = [reader.visit(node) for node in loop.body]
    loop.iter = nodes.Getitem(loop.iter, nodes.Slice(_name(_OFFSET), None, None), "load")
    tree.body = [*[_only_whole(node) for node in head], _set_offset(alias), loop, *end]
    tree.set_environment(environment)
    tree.set_lineno(1)
    code = environment.compile(tree)
    template = environment.template_class.from_code(
        environment, code, environment.make_globals(None), None
    )
    return Piecewise(template, reader.reach, reader.needs)


def _place_of_loop(body: Sequence[nodes.Node]) -> int:
    """The loop over ``messages``, or over a name that stands for them without the first."""
    loops = [
        index
        for index, node in enumerate(body)
        if isinstance(node, nodes.For)
        and isinstance(node.iter, nodes.Name)
        and (node.iter.name == _MESSAGES or _aliases(body[:index], node.iter.name))
    ]
    if len(loops) != 1:
        raise _NotLocalError
    loop = body[loops[0]]
    assert isinstance(loop, nodes.For)
    if loop.test is not None or loop.recursive or loop.else_:
        raise _NotLocalError
    if not isinstance(loop.target, nodes.Name):
        raise _NotLocalError
    return loops[0]


def _aliases(head: Iterable[nodes.Node], name: str) -> list[nodes.Assign]:
    """Where ``name`` is set to all messages or to all but the first."""
    return [
        found
        for node in head
        for found in _all(node, nodes.Assign)
        if isinstance(found.target, nodes.Name)
        and found.target.name == name != _MESSAGES
        and _is_rest(found.node, {_MESSAGES, name})
    ]


def _is_rest(node: nodes.Node, names: set[str]) -> bool:
    """``messages`` or ``messages[1:]``."""
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        cut = node.arg
        is_from_one = isinstance(cut.start, nodes.Const) and cut.start.value == 1
        return is_from_one and not (cut.stop or cut.step) and _is_rest(node.node, names)
    return isinstance(node, nodes.Name) and node.name in names


class _Reader(NodeTransformer):
    """Checks the head, and rewrites the loop's body so that its indices count from ``start``.

    ``_is_loop``: whether ``loop`` is that of the messages.
    """

    def __init__(self, *, alias: str, macros: set[str]) -> None:
        self.reach = 0
        self.num_aliases = 0
        self._seen = 1  # messages that the head looks at by number
        self._names = {_MESSAGES, alias}
        self._alias = alias
        self._macros = macros
        self._is_loop = True

    def check_head(self, node: nodes.Node) -> None:
        """The head may look at messages by number only, and name the rest of them."""
        for macro in _all(node, nodes.Macro):
            _check_namespaces(macro.body, _assigned(macro.body))
        for found in _aliases([node], self._alias):
            self.num_aliases += 1
            found.target, found.node = nodes.Name(_OFFSET, "store"), nodes.Const(0)
        self._is_loop = False
        self.visit(node)
        self._is_loop = True

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, _REFUSED) or (isinstance(node, nodes.Break) and self._is_loop):
            raise _NotLocalError
        visited: nodes.Node = super().generic_visit(node, *args, **kwargs)
        return visited

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        if node.name in self._names or (node.name == "loop" and self._is_loop):
            raise _NotLocalError
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = self.visit(node.iter)
        before, self._is_loop = self._is_loop, False
        self.visit(node.target)
        node.test = self.visit(node.test) if node.test is not None else None
        node.body = [self.visit(child) for child in node.body]
        self._is_loop = before
        node.else_ = [self.visit(child) for child in node.else_]
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        if isinstance(node.node, nodes.Name) and node.node.name not in _PURE_CALLS | self._macros:
            raise _NotLocalError
        return self.generic_visit(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.name == "random":
            raise _NotLocalError
        return self.generic_visit(node)

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        is_loop = isinstance(node.node, nodes.Name) and node.node.name == "loop"
        if not (is_loop and self._is_loop):
            return self.generic_visit(node)
        if node.attr in ("index0", "index"):
            return nodes.Add(node, _name(_OFFSET))
        if node.attr == "first":
            index = nodes.Add(nodes.Getattr(node.node, "index0", "load"), _name(_OFFSET))
            return nodes.Compare(index, [nodes.Operand("eq", nodes.Const(0))])
        if node.attr in ("last", "nextitem"):
            self.reach = max(self.reach, 1)
            return node
        raise _NotLocalError

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        if not (isinstance(node.node, nodes.Name) and node.node.name in self._names):
            return self.generic_visit(node)
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, int):
            self._seen = max(self._seen, node.arg.value + 1)
            return node
        distance = _distance(node.arg) if self._is_loop else None
        if distance is None or node.node.name != _MESSAGES:
            raise _NotLocalError
        self.reach = max(self.reach, distance)
        return nodes.Getitem(_name(_WATCHED), self.visit(node.arg), "load")

    @property
    def needs(self) -> int:
        """Each alias may begin one message later than the one before."""
        return self._seen + self.num_aliases


def _distance(index: nodes.Node) -> int | None:
    """``loop.index0 + 1`` -> 1, ``loop.index`` -> 1, ``loop.index0 - 1`` -> -1."""
    if isinstance(index, nodes.Add | nodes.Sub) and isinstance(index.right, nodes.Const):
        base, step = _distance(index.left), index.right.value
        if base is None or not isinstance(step, int) or step < 0:
            return None
        return base + step if isinstance(index, nodes.Add) else base - step
    if not (isinstance(index, nodes.Getattr) and isinstance(index.node, nodes.Name)):
        return None
    return {"index0": 0, "index": 1}.get(index.attr) if index.node.name == "loop" else None


def _check_namespaces(body: Iterable[nodes.Node], own: set[str]) -> None:
    """A namespace that lives longer than a message carries something from one to the next."""
    changed = {found.name for node in body for found in _all(node, nodes.NSRef)}
    if not changed <= own:
        raise _NotLocalError


def _assigned(body: Iterable[nodes.Node]) -> set[str]:
    return {
        found.target.name
        for node in body
        for found in _all(node, nodes.Assign)
        if isinstance(found.target, nodes.Name)
    }


def _all(node: nodes.Node, kind: type[Any]) -> list[Any]:
    """The node itself and all below it that are of a kind."""
    return [*([node] if isinstance(node, kind) else []), *node.find_all(kind)]


def _name(name: str) -> nodes.Name:
    return nodes.Name(name, "load")


def _set_offset(alias: str) -> nodes.Node:
    """Where the loop begins: ``start``, less the messages that its list leaves out in front."""
    num_out = nodes.Sub(_length(_MESSAGES), _length(alias))
    offset = nodes.CondExpr(_name(_START), nodes.Sub(_name(_START), num_out), nodes.Const(0))
    return nodes.Assign(nodes.Name(_OFFSET, "store"), offset)


def _length(name: str) -> nodes.Node:
    return nodes.Filter(_name(name), "length", [], [], None, None)


class _Muted(NodeTransformer):
    """The head without its text, unless the whole is rendered; its names are still set."""

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        return nodes.If(nodes.Not(_name(_START)), [node], [], [])

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        return node


def _only_whole(node: nodes.Node) -> nodes.Node:
    muted: nodes.Node = _Muted().visit(node)
    return muted
