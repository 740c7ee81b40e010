// Markdown of the chat: what models write becomes these elements, and nothing that they write becomes any other.

import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

import { Markdown } from "../../src/quire/serve/dashboard/page/markdown.mjs";
import { Element, openDocument } from "./document.mjs";

beforeEach(() => openDocument());

/** Write nodes down: <tag name=value>text</tag>. */
function written(node) {
    if (!(node instanceof Element)) return node.textContent;
    const names = ["href", "start"].filter((name) => name in node.attributes);
    const attributes = names.map((name) => ` ${name}=${node.attributes[name]}`).join("");
    const language = node.dataset.language ? ` ${node.dataset.language}` : "";
    return `<${node.tag}${attributes}${language}>${node.childNodes.map(written).join("")}</${node.tag}>`;
}

function shown(text) {
    const host = new Element("div");
    new Markdown(host).show(text);
    return host.childNodes.map(written).join("");
}

const CASES = {
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "# Big\n### Small ##\n#none": "<h1>Big</h1><h3>Small</h3><p>#none</p>",
    "a **bold** and *slanted* __b__ _i_ ~~gone~~": "<p>a <strong>bold</strong> and <em>slanted</em> <strong>b</strong> <em>i</em> <del>gone</del></p>",
    "**a *b* c**": "<p><strong>a <em>b</em> c</strong></p>",
    "*a **b** c*": "<p><em>a <strong>b</strong> c</em></p>",
    "2 * 3 * 4, a_b_c, **open": "<p>2 * 3 * 4, a_b_c, **open</p>",
    "\\*not\\* \\\\": "<p>*not* \\</p>",
    "`a *b*` ``c ` d``": "<p><code>a *b*</code> <code>c ` d</code></p>",
    "`open": "<p>`open</p>",
    "```python\nx = 1\n\n# y\n```\nafter": "<pre python><code>x = 1\n\n# y</code></pre><p>after</p>",
    "~~~\nstill *open*": "<pre><code>still *open*</code></pre>",
    "- a\n- b\n  more\n\n- c": "<ul><li>a</li><li>b<p>more</p></li><li>c</li></ul>",
    "1. a\n2. b\n   - c\n   - d\n3. e": "<ol><li>a</li><li>b<ul><li>c</li><li>d</li></ul></li><li>e</li></ol>",
    "4) a\n5) b": "<ol start=4><li>a</li><li>b</li></ol>",
    "- a\n1. b": "<ul><li>a</li></ul><ol><li>b</li></ol>",
    "> a\n> - b\n\nc": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>",
    "a\n\n---\n\nb": "<p>a</p><hr></hr><p>b</p>",
    "| a | b |\n|---|:-:|\n| 1 | *2* |\n\nx": "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td><em>2</em></td></tr></tbody></table><p>x</p>",
    "a | b is no table": "<p>a | b is no table</p>",
    "[text](https://a.example/b?c=d) and https://e.example/f.": "<p><a href=https://a.example/b?c=d>text</a> and <a href=https://e.example/f>https://e.example/f</a>.</p>",
    "![picture](https://a.example/b.png)": "<p><a href=https://a.example/b.png>picture</a></p>",
};

test("what models write is shown as they mean it", () => {
    for (const [text, expected] of Object.entries(CASES)) assert.equal(shown(text), expected, text);
});

test("nothing becomes HTML, and no link leads to a script", () => {
    const hostile = [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[x](javascript:alert(1))",
        "[x](data:text/html,<script>)",
        "[x]( JaVaScRiPt:alert(1))",
        "![x](vbscript:x)",
    ];
    for (const text of hostile) assert.equal(shown(text), `<p>${text}</p>`);
    const host = new Element("div");
    new Markdown(host).show("[a](https://b.example)");
    const link = host.querySelector("a");
    assert.deepEqual([link.attributes.rel, link.attributes.target], ["noopener noreferrer", "_blank"]);
});

test("a text that grows ends as it is shown at once, and keeps the blocks that stay", () => {
    const whole = Object.keys(CASES).join("\n\n");
    const host = new Element("div");
    const page = new Markdown(host);
    let first = null;
    for (let length = 1; length <= whole.length; length += 7) {
        page.show(whole.slice(0, length));
        if (length > 20) assert.equal(host.firstElementChild, (first ??= host.firstElementChild));
    }
    page.show(whole);
    assert.equal(host.childNodes.map(written).join(""), shown(whole));
});

test("any text is taken, of any length and depth", () => {
    const pieces = ["*", "**", "_", "`", "```", "[", "](", ")", "> ", "- ", "1. ", "#", "|", "-|-", "\n", "  ", "a", "~~", "\\", "https://"];
    let state = 7;
    const draw = (below) => (state = (state * 48271) % 2147483647) % below;
    for (let turn = 0; turn < 300; turn += 1) shown(Array.from({ length: 60 }, () => pieces[draw(pieces.length)]).join(""));
    for (const piece of pieces) shown(piece.repeat(3000));
    assert.ok(shown("> ".repeat(500) + "deep").includes("deep"));
});
