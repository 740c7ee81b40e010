"""The sandbox that chat templates run in: it limits what a template can call, and its time and memory.

A template is part of a downloaded model folder and cannot be trusted. Jinja's sandbox denies it access to Python, but
does not stop it from looping for hours or from building a text of gigabytes. So each rendering has a budget of steps,
and every operation is charged:

    an iteration, a call of a macro         the nodes of its body, counted when the template is compiled
    ~ + * % filters, methods, slices        the sizes of their inputs and outputs; a call also a constant
    == in [key]                             the size of the compared value, unless one side is a constant
    the text of a list or object            the size of the text
    a literal list or object                the size of all its contents, at every depth

A result that can be much larger than its inputs is charged before it is made. The last rule stops containers that
contain each other and double with each line; with it, the size of a value bounds the cost of every operation on it.
Steps are counted, not timed, so a busy machine renders the same conversations as an idle one. Parts of Jinja that no
chat template needs and that are hard to bound are left out: blocks, `lipsum`, `batch`, `urlize`, `str.translate` and
others.

Every operation also keeps the owners of its characters: see `client_text`.

Rejected: a child process with limits for each rendering. Starting it would take longer than the rendering.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

import jinja2.ext
import jinja2.meta
import jinja2.runtime
import jinja2.sandbox
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import UndefinedError
from jinja2.utils import missing
from markupsafe import Markup

from quire.engine.text.client_text import Client, filled, from_template, made_of, plain
from quire.engine.text.template_filters import metered_filters, metered_tests
from quire.engine.text.template_meter import (
    CALL_STEPS,
    MAX_BITS,
    MAX_TUPLE,
    MAX_WIDTH,
    VIEWS,
    Meter,
    names_in,
)

GLOBALS: Final = frozenset({"range", "raise_exception", "strftime_now", "dict", "namespace"})
"""The names that every template can use."""

MAX_SOURCE_CHARACTERS: Final = 1 << 17
MAX_NODES: Final = 20_000  # the largest templates of published models have a fifth of this

_TEXT_METHODS: Final = names_in(
    "capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal isdigit isidentifier"
    " islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix"
    " replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill"
)
_METHODS: Final[dict[type, frozenset[str]]] = {
    **dict.fromkeys((str, Markup, *Client), _TEXT_METHODS),
    dict: names_in("copy get items keys values"),
    **dict.fromkeys((list, tuple), names_in("copy count index")),
    **dict.fromkeys((int, bool, float, range, *VIEWS), names_in("")),
}
"""The methods of plain data that a template can use. For other objects, Jinja's sandbox decides."""

_OWN_NAMES: Final = frozenset(dir(dict))
_LOOP_NAMES: Final = names_in("first index index0 last")
_COMBINING_METHODS: Final = names_in("center join ljust replace rjust")


class Steps(int):
    """A constant in a template's code that stands for a charge of this many steps."""


# ---- the compiler -------------------------------------------------------------------------------------------------


class MeteredCode(CodeGenerator):
    """Jinja's compiler, with a charge added wherever the cost depends on the number of runs or on the values."""

    def write_commons(self) -> None:
        """Write the beginning of a template: short names for the methods that charge."""
        super().write_commons()
        for name in ("charge", "add", "concat", "str_join"):
            self.writeline(f"{name} = context.{name}")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        """Write a loop: each iteration is charged, and each item that its condition leaves out."""
        if node.test is not None:
            node.test = nodes.Or(_steps([node.test]), node.test, lineno=node.lineno)
        _charge_body(node)
        super().visit_For(node, frame)

    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:
        """Write a macro: each call is charged."""
        _charge_body(node)
        super().visit_Macro(node, frame)

    def visit_CallBlock(self, node: nodes.CallBlock, frame: Frame) -> None:
        """Write a call block, the argument of a macro: each call is charged."""
        _charge_body(node)
        super().visit_CallBlock(node, frame)

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        """Write a constant, or a charge for `Steps`."""
        if isinstance(node.value, Steps):
            self.write(f"charge({int(node.value)})")
        else:
            super().visit_Const(node, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        """Write a sum."""
        self.write("add(")
        self.visit(node.left, frame)
        self.write(", ")
        self.visit(node.right, frame)
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """Write a comparison. Charging for one side is enough: no comparison costs more than its smaller side."""
        self.write("(")
        is_key = node.ops[0].op in ("in", "notin") and not isinstance(node.expr, nodes.Const)
        self._write_charged("key" if is_key else "", node.expr, self.visit, frame)
        left = node.expr
        for operand in node.ops:
            self.write(f" {operators[operand.op]} ")
            self._write_charged(_comparison_charge(left, operand), operand.expr, self.visit, frame)
            left = operand.expr
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """Write a look-up; a slice is charged, because it is a copy, and a key, because it is compared."""
        if isinstance(node.arg, nodes.Slice):
            self._write_charged("read", node, super().visit_Getitem, frame)
            return
        self.write("environment.getitem(")
        self.visit(node.node, frame)
        self.write(", ")
        self._write_charged("" if isinstance(node.arg, nodes.Const) else "key", node.arg, self.visit, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        """Write a list."""
        self._write_charged("" if _is_constant(node) else "weigh", node, super().visit_List, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """Write an object."""
        self._write_charged("" if _is_constant(node) else "weigh", node, super().visit_Dict, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        """Write a tuple, or the targets of an assignment."""
        if node.ctx == "load" and (len(node.items) > MAX_TUPLE or not all(map(_is_plain, node.items))):
            self._write_charged("short", node, super().visit_Tuple, frame)
        else:
            super().visit_Tuple(node, frame)

    def _write_charged(self, charge: str, node: Any, visit: Callable[[Any, Frame], None], frame: Frame) -> None:
        self.write(f"context.{charge}(" if charge else "(")
        visit(node, frame)
        self.write(")")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("context.text(")


def _steps(charged: list[Any]) -> nodes.Const:
    """Return a charge for running some nodes once."""
    count = 1 + sum(1 + sum(1 for _ in node.find_all(nodes.Node)) for node in charged)
    return nodes.Const(Steps(count), lineno=charged[0].lineno if charged else 1)


def _charge_body(node: nodes.For | nodes.Macro | nodes.CallBlock) -> None:
    charge = _steps(node.body)
    node.body = [nodes.ExprStmt(charge, lineno=charge.lineno), *node.body]


def _comparison_charge(left: nodes.Expr, operand: nodes.Operand) -> str:
    """Return the method that charges for the right side of a comparison; empty if a constant bounds the cost."""
    if operand.op in ("in", "notin"):
        return "" if isinstance(operand.expr, nodes.Literal) else "held"
    return "" if isinstance(left, nodes.Const) or isinstance(operand.expr, nodes.Const) else "weigh"


def _is_constant(node: nodes.Expr) -> bool:
    return all(isinstance(child, nodes.Literal) for child in node.find_all(nodes.Expr))


def _is_plain(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const)


# ---- the environment ------------------------------------------------------------------------------------------------


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which every operation is charged. One for each template."""

    code_generator_class = MeteredCode
    context_class = Meter
    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return `left operator right`."""
        if operator != "%":
            context.multiply(operator, left, right)
        elif left.__class__ is int:
            return left % right
        elif isinstance(left, str):
            context.fill(left, [right])
            if not isinstance(left, Markup):
                return context.read(filled(left, plain(left).__mod__, (right,), {}))
            return context.read(made_of(left % right, (right,)))
        return context.read(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template can use an attribute."""
        methods = _METHODS.get(obj.__class__)
        return super().is_safe_attribute(obj, attr, value) if methods is None else attr in methods

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute, or the item with this name; the common cases take a short cut."""
        kind = obj.__class__
        if kind is dict and attribute not in _OWN_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is jinja2.runtime.LoopContext and attribute in _LOOP_NAMES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Any:
        """Return a sandboxed `str.format`; None for every other method."""
        return None if getattr(value, "__name__", "") == "format_map" else super().wrap_str_format(value)

    def call(__self, __context: Any, __function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method, a macro or a global function."""
        if kwargs:  # these two are for functions that take a context, which this sandbox does not have
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
        method = getattr(__function, "__wrapped__", __function)
        subject = getattr(method, "__self__", None)
        __context.charge(CALL_STEPS)
        if isinstance(subject, (str, list, tuple, dict)):
            options = [*args, *kwargs.values()]
            __context.method(subject, method.__name__, options)
            if isinstance(subject, Markup):
                result = made_of(__function(*args, **kwargs), (subject, *options))
            elif method.__name__ == "format":
                result = filled(str(subject), __function, args, kwargs)
            elif subject.__class__ is str and method.__name__ in _COMBINING_METHODS:
                result = getattr(from_template(subject), method.__name__)(*args, **kwargs)
            else:
                result = __function(*args, **kwargs)
            return __context.read(result)
        if isinstance(__function, jinja2.runtime.Macro):
            if __function.catch_varargs or __function.catch_kwargs:
                __context.weigh([*args, *kwargs.values()])
            return super().call(__context, __function, *args, **kwargs)
        options = [*args, *kwargs.values()]
        __context.weigh_text(options)  # an exception can contain them
        result = super().call(__context, __function, *args, **kwargs)
        return __context.read(_of_call(__function, result, options)) if isinstance(result, str) else result


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the text that a model is trained to generate; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without Python's internal names, and with a constant text form."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # two that contain each other would print without end
        return "<Namespace>"


class _Undefined(jinja2.Undefined):
    """An undefined value whose name is short, because errors contain it."""

    __slots__ = ()

    def __init__(self, hint: Any = None, obj: Any = missing, name: Any = None, exc: Any = UndefinedError) -> None:
        if not isinstance(name, int):
            name = name[:MAX_WIDTH] if isinstance(name, str) else type(name).__name__
        super().__init__(hint, obj, name, exc)


def compile_template(source: str, now: Callable[[], datetime]) -> tuple[jinja2.Template, frozenset[str]]:
    """Return a compiled template, and the names that it looks up without setting them.

    Raises the errors of Jinja and Python for source that is not a template, or that is too long.
    """
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise jinja2.TemplateError(f"it has {len(source)} characters, more than {MAX_SOURCE_CHARACTERS}")
    environment = _environment(now)
    tree = environment.parse(source)
    if sum(1 for _ in tree.find_all(nodes.Node)) > MAX_NODES:
        raise jinja2.TemplateError(f"it has more than {MAX_NODES} nodes")
    for node in tree.find_all((nodes.Block, nodes.EvalContextModifier)):
        raise jinja2.TemplateError(f"line {node.lineno}: blocks and autoescape are not supported")
    if any(isinstance(c.value, int) and c.value.bit_length() > MAX_BITS for c in tree.find_all(nodes.Const)):
        raise jinja2.TemplateError("a number is too large")
    compiled = environment.from_string(tree)
    return compiled, frozenset(jinja2.meta.find_undeclared_variables(tree))


def _environment(now: Callable[[], datetime]) -> Sandbox:
    """Return the part of the environment of transformers' templates that chat templates use."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def make_dict(*items: Any, **fields: Any) -> dict[str, Any]:  # instead of the class with all its attributes
        return dict(*items, **fields)

    def strftime_now(form: str) -> str:
        return now().strftime(form[:MAX_WIDTH])

    environment = Sandbox(
        undefined=_Undefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
        autoescape=False,
        optimized=False,  # Python folds constants; Jinja would run filters while it compiles
    )
    environment.filters = metered_filters(environment.filters)
    environment.tests = metered_tests(environment.tests)
    environment.globals = {
        "range": environment.globals["range"],
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": make_dict,
        "namespace": _Namespace,
    }
    return environment


def _of_call(function: Any, result: str, options: list[Any]) -> str:
    """Return the text of a call with its owners, which a loop keeps and a global function does not."""
    owner = getattr(function, "__self__", function)
    return result if isinstance(owner, jinja2.runtime.LoopContext) else made_of(result, options)
