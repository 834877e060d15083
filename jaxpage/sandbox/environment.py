"""jinja2's environment in which no template takes more than its time and memory.

jinja2's own sandbox keeps a template from reaching out, but not from doubling a text forty times
or from counting to a billion. Here every loop, call, filter and test is a step, each of which looks
at the clock; and whatever is about to be made is weighed before it is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jaxpage.sandbox.checks import check_format, check_method, check_operation
from jaxpage.sandbox.filters import OWN, bounded, stepping
from jaxpage.sandbox.meter import MOST_WEIGHT, meter, refuse

MOST_SOURCE = 1 << 18
"""Characters of a template; the longest known has some 30,000."""
_NESTED_SPEC = re.compile(r"\{[^{}]*:[^{}]*\{")


class _Bounded(CodeGenerator):
    """Compiles templates so that every value they make is handed to the environment."""

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._made(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._made(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._made(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._made(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _made(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """The environment. Templates are compiled and rendered inside `metered`."""

    code_generator_class = _Bounded
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=self._printed)
        filters = self.filters | OWN
        self.filters = {name: bounded(name, each) for name, each in filters.items()}
        self.tests = {name: stepping(each) for name, each in self.tests.items()}
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The tree, in which whatever is looped over is counted."""
        if len(source) > MOST_SOURCE:
            refuse(f"has {len(source)} characters, more than {MOST_SOURCE}")
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(
                loop.iter, "counted", [], [], None, None, lineno=loop.iter.lineno
            )
        return tree

    def made(self, value: Any) -> Any:
        """`value`, which an expression made, after it was weighed."""
        return meter().made(value)

    def joined(self, parts: tuple[Any, ...]) -> str:
        """The texts of `parts`, as the operator ~."""
        meter().weigh(*parts)
        return self.made("".join(map(str, parts)))

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]  # a str method there
        """The text of a template's or macro's output."""
        of_now, found, size = meter(), list[str](), 0
        for part in parts:
            size += len(part)
            if size > MOST_WEIGHT:
                refuse(f"writes more than {MOST_WEIGHT} characters")
            found.append(part)
        return of_now.made("".join(found))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        of_now = meter()
        of_now.step()
        of_now.weigh(
            *(each for each in (*args, *kwargs.values()) if not isinstance(each, Namespace))
        )
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            args = check_method(of_now, owner, getattr(__obj, "__name__", ""), args, kwargs)
        return of_now.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        of_now = meter()
        of_now.step()
        check_operation(of_now, operator, left, right)
        return of_now.made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format, which jinja2 makes safe, with bounded widths too."""
        safe = super().wrap_str_format(value)
        if safe is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            text = value.__self__
            if _NESTED_SPEC.search(text):
                refuse("computes the width of a format")
            check_format(meter(), text, "{", (*args, *kwargs.values()))
            return self.made(safe(*args, **kwargs))

        return bounded

    def _printed(self, value: Any) -> Any:
        if not isinstance(value, str):
            meter().weigh(value)
        return value
