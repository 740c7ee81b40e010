// Turns the Markdown that models write into elements.
//
//     text ──► blocksOf ──► headings, paragraphs, lists, quotes, tables, code ──► inlineOf: bold, italics, code, links
//
// Every piece of the text becomes a text node, so a model's output is never parsed as HTML. A link leads to http, https
// or mailto or stays text, and an image becomes a link. The text grows while the model writes it, and only changed
// blocks are built again. A mark that is not closed yet is shown as text.

const MAX_SPAN = 2000; // maximum characters between the two ends of a mark, so that the work stays linear in the text
const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const LINK = /^\[([^\][]*)\]\(\s*(\S+?)(?:\s+"[^"]*")?\s*\)/;
const ADDRESS = /^https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"]/;
const SAFE_TARGET = /^(?:https?:|mailto:)/i;
const MARKS = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };

const isBlank = (line) => line.trim() === "";

/** Make an element with children. */
function make(tag, ...children) {
    const element = document.createElement(tag);
    element.append(...children);
    return element;
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

/** Cut a text into blocks: `{ kind, lines }`, with details from the first line. Pure. */
export function blocksOf(text) {
    const lines = text.split("\n");
    const blocks = [];
    let place = 0;
    while (place < lines.length) {
        if (isBlank(lines[place])) {
            place += 1;
            continue;
        }
        const block = blockAt(lines, place);
        blocks.push(block);
        place = block.end;
    }
    return blocks;
}

function blockAt(lines, start) {
    const line = lines[start];
    const fence = FENCE.exec(line);
    if (fence) return fencedAt(lines, start, fence);
    const heading = HEADING.exec(line);
    if (heading) return { kind: `h${heading[1].length}`, lines: [heading[2].replace(/\s+#+\s*$/, "")], end: start + 1 };
    if (RULE.test(line)) return { kind: "hr", lines: [], end: start + 1 };
    if (QUOTE.test(line)) {
        const end = endOf(lines, start, (next) => QUOTE.test(next));
        return { kind: "blockquote", lines: lines.slice(start, end).map((each) => QUOTE.exec(each)[1]), end };
    }
    if (ITEM.test(line)) return listAt(lines, start);
    if (line.includes("|") && TABLE_RULE.test(lines[start + 1] ?? "") && lines[start + 1].includes("-")) {
        const end = endOf(lines, start + 2, (next) => next.includes("|"));
        return { kind: "table", lines: [line, ...lines.slice(start + 2, end)], end };
    }
    const end = endOf(lines, start + 1, (next) => !isBlank(next) && !startsBlock(next));
    return { kind: "p", lines: lines.slice(start, end), end };
}

const startsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(line));

function endOf(lines, start, isPart) {
    let end = start;
    while (end < lines.length && isPart(lines[end])) end += 1;
    return end;
}

function fencedAt(lines, start, [, fence, language]) {
    const isClose = (line) => line.trim().startsWith(fence) && line.trim().replaceAll(fence[0], "") === "";
    const close = endOf(lines, start + 1, (line) => !isClose(line));
    return { kind: "pre", language, lines: lines.slice(start + 1, close), end: Math.min(close + 1, lines.length) };
}

/** A list continues while lines are items or are indented below one, with or without blank lines between them. */
function listAt(lines, start) {
    const [, indent, marker] = ITEM.exec(lines[start]);
    const isOrdered = /\d/.test(marker);
    const items = [];
    let end = start;
    while (end < lines.length) {
        const line = lines[end];
        const next = isBlank(line) ? (lines[end + 1] ?? "") : line;
        const item = ITEM.exec(line);
        const isDeeper = /^\s/.test(next) && next.search(/\S/) > indent.length;
        if (item && item[1].length <= indent.length) {
            if (/\d/.test(item[2]) !== isOrdered || RULE.test(line)) break;
            items.push([item[3]]);
        } else if (isDeeper || (!isBlank(line) && !startsBlock(line) && !isBlank(lines[end - 1]))) {
            items.at(-1).push(line);
        } else if (!isBlank(line) || !ITEM.test(next)) break;
        end += 1;
    }
    const first = isOrdered ? Number.parseInt(marker, 10) : 1;
    return { kind: isOrdered ? "ol" : "ul", first, items, lines: lines.slice(start, end), end };
}

/** Remove the common indentation of lines. */
function outdented(lines) {
    const indents = lines.filter((line) => !isBlank(line)).map((line) => line.search(/\S/));
    return lines.map((line) => line.slice(Math.min(...indents)));
}

function build(block, depth) {
    const { kind, lines } = block;
    if (kind === "pre") return codeBlock(block);
    if (kind === "hr") return make("hr");
    if (kind === "blockquote") return make(kind, ...elementsOf(lines.join("\n"), depth + 1));
    if (kind === "table") return table(lines);
    if (kind === "p" || kind[0] === "h") return make(kind, ...inlineOf(lines.join("\n")));
    const items = block.items.map(([first, ...rest]) =>
        make("li", ...inlineOf(first), ...(rest.length ? elementsOf(outdented(rest).join("\n"), depth + 1) : [])),
    );
    const list = make(kind, ...items);
    if (block.first !== 1) list.setAttribute("start", block.first);
    return list;
}

function elementsOf(text, depth) {
    if (depth > MAX_DEPTH) return [make("p", text)];
    return blocksOf(text).map((block) => build(block, depth));
}

function codeBlock({ lines, language }) {
    const block = make("pre", make("code", lines.join("\n")));
    if (language) block.dataset.language = language;
    block.tabIndex = 0; // it scrolls, so the keyboard must reach it
    return block;
}

function table(lines) {
    const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|");
    const row = (line, tag) => make("tr", ...cells(line).map((cell) => make(tag, ...inlineOf(cell.trim()))));
    const [head, ...body] = lines;
    return make("table", make("thead", row(head, "th")), make("tbody", ...body.map((line) => row(line, "td"))));
}

// ---- within a line --------------------------------------------------------------------------------------------------

/** Return the nodes of a line or a paragraph: texts and elements. */
function inlineOf(text, depth = 0) {
    const nodes = [];
    let plain = "";
    const add = (node) => {
        if (plain) nodes.push(plain);
        plain = "";
        nodes.push(node);
    };
    let place = 0;
    while (place < text.length) {
        const found = depth < MAX_DEPTH ? spanAt(text, place, depth) : null;
        if (found?.node) add(found.node);
        else plain += found ? found.text : text[place];
        place += found ? found.length : 1;
    }
    if (plain) nodes.push(plain);
    return nodes;
}

/** Return the element or text that begins at a place, with its length; null: one plain character. */
function spanAt(text, place, depth) {
    const letter = text[place];
    if (letter === "\\" && /[!-/:-@[-`{-~]/.test(text[place + 1] ?? "")) return { text: text[place + 1], length: 2 };
    if (letter === "`") return codeAt(text, place);
    if (letter === "[") return linkAt(text, place, depth);
    if (letter === "!" && text[place + 1] === "[") {
        const link = linkAt(text, place + 1, depth);
        return link && { ...link, length: link.length + 1 };
    }
    if (letter === "h" && !/\w/.test(text[place - 1] ?? "")) {
        const address = ADDRESS.exec(text.slice(place, place + MAX_SPAN));
        return address && { node: link(address[0], [address[0]]), length: address[0].length };
    }
    const mark = [text.slice(place, place + 2), letter].find((each) => Object.hasOwn(MARKS, each));
    return mark ? markedAt(text, place, mark, depth) : null;
}

function codeAt(text, place) {
    const ticks = /^`+/.exec(text.slice(place, place + MAX_SPAN))[0];
    const rest = text.slice(place + ticks.length, place + MAX_SPAN);
    for (let end = rest.indexOf(ticks); end > 0; end = rest.indexOf(ticks, end + 1)) {
        if (rest[end - 1] === "`" || rest[end + ticks.length] === "`") continue;
        return { node: make("code", rest.slice(0, end).trim()), length: 2 * ticks.length + end };
    }
    return { text: ticks, length: ticks.length };
}

function linkAt(text, place, depth) {
    const found = LINK.exec(text.slice(place, place + MAX_SPAN));
    if (!found || !SAFE_TARGET.test(found[2])) return null;
    return { node: link(found[2], inlineOf(found[1], depth + 1)), length: found[0].length };
}

function link(target, children) {
    const element = make("a", ...children);
    element.setAttribute("href", target);
    element.setAttribute("target", "_blank");
    element.setAttribute("rel", "noopener noreferrer");
    return element;
}

/** A mark opens before a letter and closes after one; an underscore inside a word is part of the word. */
function markedAt(text, place, mark, depth) {
    const inner = text.slice(place + mark.length, place + MAX_SPAN);
    const isWord = (letter) => letter !== undefined && /[\p{L}\p{N}]/u.test(letter);
    if (!inner || /\s/.test(inner[0]) || (mark[0] === "_" && isWord(text[place - 1]))) return null;
    for (let end = inner.indexOf(mark, 1); end > 0; end = inner.indexOf(mark, end + mark.length)) {
        if (mark.length === 1 && inner[end + 1] === mark) {
            end += 1; // two of them close another mark
            continue;
        }
        if (/\s/.test(inner[end - 1]) || (mark[0] === "_" && isWord(inner[end + mark.length]))) continue;
        const node = make(MARKS[mark], ...inlineOf(inner.slice(0, end), depth + 1));
        return { node, length: end + 2 * mark.length };
    }
    return { text: mark, length: mark.length };
}

// ---- a text that grows ----------------------------------------------------------------------------------------------

/** Shows a growing text in a host. */
export class Markdown {
    constructor(host) {
        this.host = host;
        this.sources = [];
    }

    /** Show a text: build only the changed blocks. Mutates. */
    show(text) {
        const blocks = blocksOf(text);
        const sources = blocks.map((block) => JSON.stringify(block));
        let same = 0;
        while (same < sources.length && sources[same] === this.sources[same]) same += 1;
        for (const stale of [...this.host.children].slice(same)) stale.remove();
        this.host.append(...blocks.slice(same).map((block) => build(block, 0)));
        this.sources = sources;
    }
}
