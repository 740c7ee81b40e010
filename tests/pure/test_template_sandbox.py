"""Chat templates of strangers: whatever they do, they end soon, take little memory, and say so in one line."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from quire.core.errors import CheckpointError, InvalidRequestError, QuireError
from quire.engine.text.chat_template import ChatTemplate, validate_messages
from quire.engine.text.template_meter import CALL_STEPS, MAX_STEPS, Meter
from quire.engine.text.template_sandbox import MAX_NODES, MAX_SOURCE_CHARACTERS

USER = {"role": "user", "content": "Hi"}
LIMIT_S = 60  # what a case takes by far less of; without limits it takes hours
MORE_KIB = 400 << 10

LOOP, END = "{% for i in range(99999) %}", "{% endfor %}"
NS = "{% set ns = namespace(x='abcdefgh', l=[1]) %}"
LONG = NS + "{% for i in range(17) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{% set x = ns.x %}"  # a million characters
TWINS = LONG + "{% set a = x[1:] %}{% set b = x[1:] %}"
MANY = NS + "{% set ns.l = ['a' * 1000000] %}{% for i in range(9) %}{% set ns.l = ns.l + ns.l %}{% endfor %}"
NESTED = "{% set ns = namespace(a=['x']) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"


def forever(body: str, before: str = "") -> str:
    """A body that is run ten billion times."""
    return before + LOOP + LOOP + body + END + END


def grown(step: str, start: str = "1") -> str:
    """A value that is put into a new one sixty times."""
    turns = f"{{% for i in range(60) %}}{{% set ns.a = {step} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(a={start}) %}}{turns}{{{{ ns.a }}}}"


HOSTILE = {
    "loops": forever(LOOP + END),
    "a condition of a loop": LOOP + "{% for j in range(99999) if false %}{% endfor %}" + END,
    "a recursive loop": "{% for x in 'ab' recursive %}{{ loop('ab') if loop.depth < 60 }}{% endfor %}",
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "callers": "{% macro f(n) %}{% if n %}{% call f(n - 1) %}{% endcall %}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "~": forever("{% set ns.x = ns.x ~ ns.x %}", NS),
    "~ at once": LONG + "{% set y = " + "~".join(["x"] * 3000) + " %}",
    "+": forever("{% set ns.x = ns.x + ns.x %}", NS),
    "+ of lists": forever("{% set ns.l = ns.l + ns.l %}", NS),
    "* of texts": forever("{% set ns.x = ns.x * 2 %}", NS),
    "* of less than nothing": forever("{% set y = 'x' * -1000000 %}{% set z = 'x'.center(-1000000) %}"),
    "* of lists": forever("{% set ns.l = ns.l * 1000 %}", NS),
    "* of numbers": forever("{% set ns.x = ns.x * ns.x %}", "{% set ns = namespace(x=3) %}"),
    "**": "{{ (9 ** 64) ** 64 }}",
    "digits": "{{ 0x" + "f" * 90_000 + " // 3 }}",
    "a number from text": "{{ ('f' * 1000000) | int(base=16) }}",
    "round": "{{ 1.5 | round(method='ceil', precision=1000000000) }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "translate": "{{ 'a'.translate({97: 'b' * 1000000}) }}",
    "indent": "{{ 'x\ny' | indent(first=true, width=1000000000) }}",
    "indent by a text": LONG + "{{ ('\n' * 100000) | indent(x) }}",
    "indented lines": LONG + "{{ ('\n' * 1000000) | indent(1000) }}",
    "tojson(indent)": "{{ messages | tojson(indent=1000000000) }}",
    "tojson(separators)": LONG + "{{ messages | tojson(separators=(x, x)) }}",
    "replace": LONG + "{{ x | replace(new=x, old='a') }}",
    "str.replace": LONG + "{{ x.replace('', x) }}",
    "join": LONG + "{{ range(99999) | join(attribute='q', d=x) }}",
    "str.join": LONG + "{{ x.join(['a'] * 99999) }}",
    "%": "{{ '%1000000000d' % 1 }}",
    "% *": "{{ '%*d' % (1000000000, 1) }}",
    "% of long values": LONG + "{{ ('%(a)s' * 500) % {'a': x} }}",
    "format": "{{ '%1000000000d' | format(1) }}",
    "str.format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "str.format of long values": LONG + "{{ ('{0}' * 1000).format(x) }}",
    "str.format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "wordwrap": LONG + "{{ x | wordwrap(1, wrapstring=x) }}",
    "lipsum": "{{ lipsum(1000000000) }}",
    "sum": "{{ ([[1]] * 99999) | sum(start=[]) }}",
    "strip": LONG + "{{ x.strip('b' * 900000 + 'abcdefgh') }}",
    "trim": LONG + "{{ x | trim('b' * 900000 + 'abcdefgh') }}",
    "sort": LONG + "{{ ([x] * 99999) | sort }}",
    "map": LONG + "{{ ([x] * 99999) | map('upper') | list | length }}",
    "many maps": LOOP + "{{ range(99999)" + "|map('string')" * 50 + "|list|length }}" + END,
    "select": LONG + "{{ range(99999) | map('string') | select('in', x) | list | length }}",
    "a path of attributes": LONG + "{{ range(99999) | map(attribute=('a.' * 400000)) | list | length }}",
    "slices": forever("{% set ns.l = ns.l + [x[1:]] %}", LONG),
    "==": forever("{% if a == b %}{% endif %}", TWINS),
    "== in a row": TWINS + "{{ " + "==".join(["a", "b"] * 2000) + " }}",
    "is eq": forever("{% if a is eq b %}{% endif %}", TWINS),
    "in a text": forever("{% if 'zq' in x %}{% endif %}", LONG),
    "in a list": forever("{% if b in l %}{% endif %}", TWINS + "{% set l = [a] * 1000 %}"),
    "in a range": forever("{% if 'a' in range(99999) %}{% endif %}"),
    "in a loop": LOOP + "{% for x in range(99999) %}{% if 'q' in loop %}{% endif %}{% endfor %}" + END,
    "split": forever("{% set y = x.split('b') %}", LONG),
    "upper": forever("{% set y = x | upper %}", LONG),
    "escape": forever("{% set ns.x = ns.x | e %}", "{% set ns = namespace(x='<' * 1000000) %}"),
    "a block that is set": forever("{% set y %}{{ x }}{% endset %}", LONG),
    "a loop that is set": LONG + "{% set y %}" + forever("{{ x }}") + "{% endset %}",
    "lists that are set": "{% set l = ['a' * 10] * 60000 %}{% set y %}" + forever("{{ l }}") + "{% endset %}",
    "a filter block": LONG + "{% filter upper %}" + forever("{{ x }}") + "{% endfilter %}",
    "lists in lists": NESTED + "{{ ns.a }}",
    "lists in lists as JSON": NESTED + "{{ ns.a | tojson }}",
    "lists in lists, compared": NESTED + "{% set b = ns.a %}" + NESTED + "{{ b == ns.a }}",
    "sums of lists": grown("[ns.a] + [ns.a]"),
    "objects in objects": grown("{'a': ns.a, 'b': ns.a}"),
    "dict in dict": grown("dict(a=ns.a, b=ns.a)"),
    "tuples in tuples": grown("(ns.a, ns.a)"),
    "lists of a default": grown("[1, 2] | map(attribute='q', default=ns.a) | list"),
    "namespaces in namespaces": grown("namespace(a=ns.a, b=ns.a)") + forever(""),
    "varargs": "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% endif %}{% endmacro %}{{ f(40, 1, 1) }}",
    "kwargs": "{% macro f(n) %}{% if n %}{{ f(n - 1, a=kwargs, b=kwargs) }}{% endif %}{% endmacro %}{{ f(40, a=1) }}",
    "depth": NS + LOOP + "{% set ns.l = [ns.l] %}" + END + "{{ ns.l | tojson(indent=4) }}",
    "a tuple as a key": forever("{{ d[t] }}", "{% set t = (1, 2) * 500000 %}{% set d = {} %}"),
    "blocks": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "autoescape": "{% autoescape true %}" + forever("x") + "{% endautoescape %}",
    "strftime_now": forever("{{ strftime_now('%1000000Y') }}"),
    "a list of a text, as text": MANY + "{{ ns.l }}",
    "a list of a text, as JSON": MANY + "{{ (ns.l | tojson) | length }}",
    "a list of a number": "{% set n = 9 ** 64 * 9 ** 64 %}{% set l = [n] * 99999 %}{{ [l] * 999 }}",
    "replace in a list": "{{ ['a' * 1000] | replace('a', 'b' * 500000) }}",
    "replace by a list": "{{ ('a' * 1000) | replace('a', ['b' * 500000]) }}",
    "replace a list": MANY + "{{ 'a' | replace(ns.l, 'b') }}",
    "join by a list": "{{ range(1000) | join(['b' * 500000]) }}",
    "upper of a list": MANY + "{{ ns.l | upper | length }}",
    "is upper of a list": MANY + "{{ ns.l is upper }}",
    "an attribute with the name of a list": MANY + "{{ 'a' | attr(ns.l) }}",
    "the name of what is missing": MANY + "{{ messages[ns.l].role }}" + forever(""),
    "an exception of a list": MANY + "{{ raise_exception(ns.l) }}",
    "the index of a list": MANY + "{{ [1].index(ns.l) }}",
    "indent at other line breaks": "{{ ('a\u2028' * 500000) | indent('x' * 1024) }}",
    "lines of other breaks": "{{ ('a\u2028' * 5000000).splitlines() | length }}",
    "round to the left": "{{ 5 | round(-1000000000) }}",
    "round a text": "{{ ('x' * 100000) | round(4, 'ceil') }}",
    "a form that is odd": "{{ '%999999999d' is odd }}",
    "a form that is divisible": "{{ '%999999999s' is divisibleby('x') }}",
    "find from the end": forever("{% set y = x.rfind(p) %}", "{% set x = 'a' * 20000 %}{% set p = 'b' + 'a' * 9000 %}"),
    "a long key": TWINS + forever("{% set y = d[b] %}", "{% set d = {a: 1} %}"),
    "a long key that is got": TWINS + forever("{% set y = d.get(b) %}", "{% set d = {a: 1} %}"),
    "a long key in an object": TWINS + forever("{% set y = b in d %}", "{% set d = {a: 1} %}"),
    "a long name": forever("{% set y = messages[x] %}", LONG),
    "escaped sums": "{% set x = ('<' * 1000000) | e %}" + "{% set y = x + '<' * 1000000 %}" * 9,
    "deep ifs": "{% if 1 %}" * 200 + "{% endif %}" * 200,
    "deep loops": "{% for x in [1] %}" * 30 + "{% endfor %}" * 30,
    "deep brackets": "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    "a long sum": "{{ " + "+".join(["1"] * 9000) + " }}",
    "a long list": "{{ [" + "1," * 9000 + "] }}" + "{{ a }}" * MAX_NODES,
    "a long source": "x" * (MAX_SOURCE_CHARACTERS + 1),
}


@contextmanager
def bounded() -> Iterator[None]:
    """Fail what takes very long; a body that takes much memory fails at its end."""

    def stop(*_: object) -> None:
        raise SystemExit("it does not end")  # nothing catches this one

    previous, peak = signal.signal(signal.SIGALRM, stop), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MORE_KIB


def rendered(source: str) -> str:
    return ChatTemplate(source, {}, now=lambda: datetime(2026, 1, 31)).render(validate_messages([USER]))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_soon_and_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meter, "left", MAX_STEPS // 10)  # so that the tests end sooner still
    with bounded(), pytest.raises(QuireError) as caught:
        rendered(HOSTILE[name])
    said = str(caught.value)
    assert "\n" not in said and len(said) < 600 and "MemoryError" not in said
    assert isinstance(caught.value, InvalidRequestError | CheckpointError)


def test_with_all_of_its_steps_a_template_ends_soon_too() -> None:
    with bounded(), pytest.raises(InvalidRequestError, match=f"more than {MAX_STEPS:,} steps"):
        rendered(HOSTILE["loops"])


def test_steps_are_counted_for_each_rendering_alone() -> None:
    template = ChatTemplate(LOOP + "{% set y = i %}" + END, {})
    for _ in range(3):
        assert template.render(validate_messages([USER])) == ""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' + 'b' ~ 1 }}{{ [1] + [2] }}{{ 1 + 2 }}", "ab1[1, 2]3"),
        ("{% for k, v in {'a': 1, 'b': 2}.items() if v > 1 %}{{ k }}{{ loop.last }}{% endfor %}", "bTrue"),
        ("{{ 'x' if 1 < 2 < 3 and 'a' in 'abc' and 'q' not in ['a', messages] else 'y' }}", "x"),
        ("{{ '%s is %5.2f' % ('pi', 3.14159) }}{{ '%d' | format(7) }}{{ '{} {a}'.format(1, a=2) }}", "pi is  3.1471 2"),
        ("{{ ' a '.strip() }}{{ 'a,b'.split(',')[-1] }}{{ 'abc'[::-1] }}{{ 'a'.center(3) }}|", "abcba a |"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user"),
        ("{{ messages | selectattr('role', 'eq', 'user') | list | length }}", "1"),
        ("{{ [3, 1] | sort | first }}{{ {'b': 1, 'a': 2} | dictsort }}", "1[('a', 2), ('b', 1)]"),
        ("{{ {'a': 1} | items | list }}", "[('a', 1)]"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}", "<1>"),
        ("{% macro f(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call f(2) %}3{% endcall %}", "<23>"),
        ("{% set y %}a{{ 1 }}{% endset %}{{ y | upper }}{% filter trim %} b {% endfilter %}", "A1b"),
        ("{{ [1, [2]] | tojson(indent=1) }}", "[\n 1,\n [\n  2\n ]\n]"),
        ("{{ (messages[0].content | safe) + '<' }}{{ '<' | e }}", "Hi&lt;&lt;"),
        ("{{ {'items': 1}.items | string | length > 3 }}{{ {'items': 1}['items'] }}", "True1"),
        ("{{ {}.a is defined }}{{ {'a': none}.a is none }}", "FalseTrue"),
    ],
)
def test_what_chat_templates_do_is_what_jinja_does(source: str, text: str) -> None:
    assert rendered(source) == text


def test_whatever_a_template_calls_takes_little_memory() -> None:
    """Every filter, test, method and operator, with large arguments, in a process with 24 MiB to spare."""
    tests = Path(__file__).parent.parent
    command = [sys.executable, "-m", "support.template_trials"]
    trials = subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=300, check=False)
    assert (trials.returncode, trials.stdout.strip(), trials.stderr) == (0, "", "")


@pytest.mark.parametrize("call", ["x.strip()", "x | trim", "x | replace('a', 'b')", "x | tojson", "range(1)"])
def test_each_call_is_charged_however_short_its_text_is(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meter, "left", 20 * CALL_STEPS)
    with pytest.raises(InvalidRequestError, match="steps"):
        rendered("{% set x = 'a' %}" + f"{{% set y = {call} %}}" * 21)
