"""Everything that a chat template can call, with arguments that are large or have a large text, in little memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

from quire.engine.text import template_sandbox
from quire.engine.text.client_text import ClientText
from quire.engine.text.template_meter import Meter

NUM_STEPS = 50_000  # 0.4 million characters
MORE_BYTES = 24 << 20
TEXT = "ab\u2028\0<% {}" * 12_000
LISTS = [[ClientText(TEXT)] * 4096, [[7**1400] * 60_000]]
VALUES: list[Any] = [
    *(ClientText(TEXT), "\n" * 100_000, "%999999999d", "{:999999999}"),
    *(7**1400, 1.5, LISTS[0], LISTS[1], tuple(LISTS[0][:60]), {"a": LISTS[0], TEXT: 1}, range(100_000)),
]
OPTIONS: list[Any] = [TEXT, "", 10**9, -(10**9), 3, LISTS[0], {"a": TEXT}]
PAIRS = [("a", TEXT), ("a", LISTS[0]), ("", TEXT), (LISTS[0], "a"), (1000, "ceil")]
ARGUMENTS: list[tuple[Any, ...]] = [(), *((option,) for option in OPTIONS), *PAIRS]
NAMES = ("a", "b")
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in"]
STATEMENTS = [
    *(
        "{{ v }}",
        "{{ v ~ a }}",
        "{% set y %}{{ v }}{% endset %}{{ y | length }}",
        "{% filter upper %}{{ v }}{% endfilter %}",
    ),
    "{% macro f(x) %}{{ x }}{{ caller() }}{% endmacro %}{% call f(v) %}{{ v }}{% endcall %}",
    "{% macro f() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(v, v, k=v) }}",
    "{% for x in v %}{{ x }}{{ loop.cycle(v, a) }}{{ loop.changed(v) }}{% endfor %}",
    "{% set n = namespace(x=v) %}{% for i in range(9) %}{% set n.x = n.x + n.x %}{% endfor %}{{ (n.x ~ '') | length }}",
    *("{{ v[a] }}", "{{ v[a].b }}", "{{ v[1:] | length }}", "{{ v[::-1] }}", "{{ {'k': v}[a] }}", "{{ v.get(a).b }}"),
    *(
        "{{ (v | e) + v }}",
        "{{ (v | e) + a }}",
        "{{ v | e | e | e | e }}",
        "{{ (v | e) % a }}",
        "{{ (a | safe).join([v]) }}",
    ),
    *("{{ v | tojson(indent=1000) }}", "{{ v | tojson(ensure_ascii=true) }}", "{{ v | tojson(separators=(a, a)) }}"),
    *("{{ v | indent(width=a, blank=true) }}", "{{ v | round(a, 'ceil') }}", "{{ v | replace(new=a, old=v) }}"),
    *(
        "{{ [v, v.upper, raise_exception] * 3000 }}",
        "{{ v | map('string') | join(a) }}",
        "{{ [v] | map(attribute=a) | list }}",
    ),
]


def expressions() -> Iterator[str]:
    """Every filter, test, method, operator and global of a template, with up to two arguments: v, a and b."""
    environment = template_sandbox._environment(datetime.now)
    for num_arguments in range(3):
        arguments = ", ".join(NAMES[:num_arguments])
        for name in environment.filters:
            yield f"v | {name}({arguments})"
        for name in filter(str.isidentifier, environment.tests):
            yield f"v is {name}({arguments})" if num_arguments else f"v is {name}"
        for name in sorted({name for names in template_sandbox._METHODS.values() for name in names}):
            yield f"v.{name}({arguments})"
        for name in environment.globals:
            yield f"{name}({', '.join(('v', *NAMES[:num_arguments]))})"
    for operator in OPERATORS:
        yield f"v {operator} a"


def run_trials() -> Iterator[str]:
    """Run every expression with every value, in an address space with `MORE_BYTES` left; yield what does not fit."""
    Meter.left = NUM_STEPS
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    sources = [*(f"{{% set r = {each} %}}" for each in dict.fromkeys(expressions())), *STATEMENTS]
    for source in sources:
        template, looked_up = template_sandbox.compile_template(source, lambda: datetime(2026, 1, 31))
        num_arguments = len(looked_up & set(NAMES))
        chosen = [arguments for arguments in ARGUMENTS if len(arguments) == num_arguments]
        for value, arguments in product(VALUES, chosen):
            try:
                for _ in template.generate({"v": value, **dict(zip(NAMES, arguments, strict=False))}):
                    pass
            except MemoryError:
                kinds = [type(each).__name__ for each in (value, *arguments)]
                yield f"{source} for {', '.join(kinds)}"
            except Exception:  # refused: by the meter, or by what was called
                continue


if __name__ == "__main__":
    failures = list(run_trials())
    print("\n".join(failures[:40]))
    sys.exit(bool(failures))
