"""Chat templates are programs from elsewhere: what bounds their time and the size of what they make.

Jinja's sandbox keeps a template from Python, and one `range` from being long; nested ranges, repeated texts and widths
are not bounded. Here every turn of a loop, call, filter and operator is counted, and what it would make is estimated
before it is made.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from threading import RLock
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg
from jinja2.visitor import NodeTransformer

#: Turns of loops, calls, filters and operators of one rendering, and its seconds of CPU time.
OPERATIONS, SECONDS = 1_000_000, 10.0
#: Characters of one value, an item of a list counting as ITEM, and of everything that one rendering makes.
LARGEST, ITEM, MADE = 50_000_000, 50, 500_000_000
#: Bits of a whole number.
BITS = 10_000
#: Filters and methods that may write every part of a text so many times, or put so much before each.
TIMES = ("expandtabs", "indent", "tojson", "translate", "urlize", "wordwrap", "xmlattr")
#: And those that fill a text, or a list, up to a width.
WIDTHS = ("batch", "center", "ljust", "rjust", "slice", "zfill")


class _Work:
    """What one rendering has done so far."""

    def __init__(self, template: int):
        self.template = template
        self.operations = self.made = 0
        self.end = time.thread_time() + SECONDS

    def step(self, items: int = 0) -> None:
        """One more operation, which goes through so many items."""
        before = self.operations
        self.operations += 1 + items
        late = self.operations // 16 > before // 16 and time.thread_time() > self.end  # the clock is slow to read
        if late or self.operations > OPERATIONS:
            raise SecurityError("the template does not come to an end: it takes too many steps")

    def make(self, size: int) -> None:
        self.made += size
        if size > LARGEST or self.made > MADE:
            raise SecurityError("the template makes too long a text")

    def result(self, value: Any) -> Any:
        """`value`, which an operation has made."""
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, list | tuple | dict):
            self.make(len(value) * ITEM)
        return value


_WORK: ContextVar[_Work] = ContextVar("work of the template that is rendered")
_LOCK = RLock()


@contextmanager
def bounded(template: str | None) -> Iterator[None]:
    """Inside, transformers renders chat templates within bounds; jinja2's SecurityError for what goes beyond them.

    template: the text that is rendered, whose length bounds what a turn of a loop writes.
    """
    from transformers.utils import chat_template_utils as utils

    with _LOCK:  # transformers compiles by this name, and has no setting for it
        before = utils._compile_jinja_template
        token = _WORK.set(_Work(len(template or "")))
        utils._compile_jinja_template = _compiled
        try:
            yield
        finally:
            utils._compile_jinja_template = before
            _WORK.reset(token)


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    from transformers.utils import chat_template_utils as utils

    environment: Any = utils._cached_compile_jinja_template("").environment
    environment.__class__ = _Bounded
    environment.optimized = False  # nothing is computed while it is compiled
    environment.finalize = _written
    del environment.globals["lipsum"]
    own = {name: _guarded(name, function) for name, function in environment.filters.items()}
    environment.filters = {**own, "_turns": _turns, "_joined": _joined, "_copied": _copied, "_compared": _compared}
    return environment.from_string(template)


class _Bounded(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        work = _WORK.get()
        work.step()
        if operator == "%" and isinstance(left, str):
            work.make(_formatted(left, right))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            work.make((len(left) + len(right)) * (1 if isinstance(left, str) else ITEM))
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(one, "__len__"):
                    work.make(len(one) * max(0, times) * (1 if isinstance(one, str) else ITEM))
        if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > BITS:
                raise SecurityError("the template makes too large a number")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        work = _WORK.get()
        work.step()
        if isinstance(__obj, Macro):
            work.make(work.template)
        elif isinstance(__obj, LoopContext) and args:
            args = (_each(args[0]), *args[1:])
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, bytes | bytearray | int | float):
            raise SecurityError(f"the template calls {type(owner).__name__}.{method.__name__}, which is not bounded")
        if isinstance(owner, list | tuple | dict):
            work.step(_items(owner))
        if isinstance(owner, str):
            if method.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])
            work.make(_estimate(method.__name__, owner, [*args, *kwargs.values()]))
        return work.result(super().call(__context, __obj, *args, **kwargs))


class _Counting(NodeTransformer):
    """Sends through a filter of ours what Jinja compiles to plain Python: loops, `~` and slices."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_turns")
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filter(node.expr, "_compared")
        for operand in node.ops:
            operand.expr = _filter(operand.expr, "_compared")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filter(node.node, "_copied")
        return node


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


def _each(items: Iterable[Any]) -> Iterator[Any]:
    work = _WORK.get()
    for item in items:
        work.step()
        work.make(work.template)
        yield item


@pass_context
def _turns(context: Any, items: Any) -> Any:
    return _each(items)


@pass_context
def _joined(context: Any, parts: list[Any]) -> str:
    work = _WORK.get()
    work.step()
    work.make(_weight(parts))
    return "".join(map(str, parts))


@pass_context
def _compared(context: Any, value: Any) -> Any:
    _WORK.get().step(_items(value))
    return value


@pass_context
def _copied(context: Any, value: Any) -> Any:
    work = _WORK.get()
    work.step()
    return work.result(value)


@pass_context
def _written(context: Any, value: Any) -> Any:
    _WORK.get().make(_weight(value))
    return value


def _guarded(name: str, function: Any) -> Any:
    """A filter whose work is counted and whose result is estimated before it is made."""
    kind = _PassArg.from_obj(function)

    @pass_context
    @wraps(function)
    def filtered(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        work = _WORK.get()
        if name in ("join", "sum", "sort", "unique") and hasattr(value, "__iter__"):
            value = value if isinstance(value, str | dict) else list(value)
        work.step(_items(value) + _items([*args, *kwargs.values()]))
        work.make(_estimate(name, value, [*args, *kwargs.values()]))
        first = {_PassArg.context: [context], _PassArg.environment: [context.environment]}
        first[_PassArg.eval_context] = [context.eval_ctx]
        return work.result(function(*(first[kind] if kind else []), value, *args, **kwargs))

    del filtered.__wrapped__
    return filtered


def _estimate(name: str, value: Any, given: list[Any]) -> int:
    """The size, at most, of what a filter or a method makes, where that is not a part of the value."""
    width = max((abs(item) if isinstance(item, int) else _weight(item) for item in given), default=0)
    if name in ("format", "format_map"):
        return _formatted(str(value), given)
    if name == "replace":
        text = str(value) if _weight(value) <= LARGEST else ""
        return len(text) + (text.count(str(given[0])) * len(str(given[1])) if len(given) > 1 else 0)
    if name == "join":
        items = given[0] if isinstance(value, str) and given else value
        between = len(value) if isinstance(value, str) else width
        return _weight(items) + (len(items) * between if hasattr(items, "__len__") else 0)
    if name in TIMES:
        return _weight(value) * (1 + max(width, _weight(given) if name == "translate" else 0))
    if name in WIDTHS:
        return (len(value) if hasattr(value, "__len__") else 0) + width
    return _weight(value) if name in ("string", "pprint", "escape", "e", "forceescape", "urlencode") else 0


def _formatted(text: str, given: Any) -> int:
    """The size, at most, of a text with values put in."""
    if "*" in text or re.search(r"\{[^{}]*\{", text):
        raise SecurityError("the template takes the width of a value from another one")
    widths = [min(int(digits[:12]), LARGEST + 1) for digits in re.findall(r"\d+", text)]
    return len(text) + sum(widths) + (text.count("%") + text.count("{")) * _weight(given)


def _items(value: Any) -> int:
    """Items of lists and mappings in one another, those that stand at several places counted at each; no further than
    OPERATIONS."""
    found, stack = 0, [value]
    while stack and found <= OPERATIONS:
        item = stack.pop()
        if isinstance(item, dict):
            found += len(item)
            stack += [each for each in item.values() if isinstance(each, list | tuple | dict)]
        elif isinstance(item, list | tuple):
            found += len(item)
            stack += [each for each in item if isinstance(each, list | tuple | dict)]
    return found


def _weight(value: Any) -> int:
    """Characters of a value that is written out, at most; counted no further than LARGEST."""
    size, stack = 0, [value]
    while stack and size <= LARGEST:
        item = stack.pop()
        size += len(item) if isinstance(item, str) else ITEM
        if isinstance(item, dict):
            stack += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            stack += item
    return size
