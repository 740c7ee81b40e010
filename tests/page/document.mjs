// A document small enough to read: elements, text and events, for tests of what the page builds without a browser.
//
// Selectors are one tag, one class, or one attribute with or without its value: what the modules of the page ask for.

const ATTRIBUTES = { tabIndex: "tabindex", className: "class" };

class Node {
    constructor() {
        this.parentNode = null;
    }

    remove() {
        const { parentNode } = this;
        if (parentNode) parentNode.childNodes.splice(parentNode.childNodes.indexOf(this), 1);
        this.parentNode = null;
    }
}

export class Text extends Node {
    constructor(data) {
        super();
        this.data = String(data);
    }

    get length() {
        return this.data.length;
    }

    get textContent() {
        return this.data;
    }

    appendData(more) {
        this.data += more;
    }
}

export class Element extends Node {
    constructor(tag, attributes = {}, ...children) {
        super();
        Object.assign(this, { tag, attributes: {}, childNodes: [], listeners: {}, disabled: false });
        this.dataset = new Proxy({}, { set: (data, name, value) => Reflect.set(data, name, String(value)) });
        this.style = { setProperty: (name, value) => (this.style[name] = value) };
        for (const [name, value] of Object.entries(attributes)) this.setAttribute(name, value);
        this.append(...children);
    }

    get children() {
        return this.childNodes.filter((node) => node instanceof Element);
    }

    get firstChild() {
        return this.childNodes[0] ?? null;
    }

    get lastChild() {
        return this.childNodes.at(-1) ?? null;
    }

    get firstElementChild() {
        return this.children[0] ?? null;
    }

    get lastElementChild() {
        return this.children.at(-1) ?? null;
    }

    get textContent() {
        return this.childNodes.map((node) => node.textContent).join("");
    }

    set textContent(text) {
        this.replaceChildren(...(text === "" ? [] : [text]));
    }

    setAttribute(name, value) {
        this.attributes[name] = String(value);
    }

    insertBefore(node, before) {
        node.remove();
        const place = before === null ? this.childNodes.length : this.childNodes.indexOf(before);
        this.childNodes.splice(place, 0, node);
        node.parentNode = this;
    }

    append(...nodes) {
        for (const node of nodes) this.insertBefore(node instanceof Node ? node : new Text(node), null);
    }

    prepend(node) {
        this.insertBefore(node, this.firstChild);
    }

    replaceChildren(...nodes) {
        for (const node of [...this.childNodes]) node.remove();
        this.append(...nodes);
    }

    cloneNode() {
        const copies = this.childNodes.map((node) => (node instanceof Text ? new Text(node.data) : node.cloneNode()));
        return new Element(this.tag, this.attributes, ...copies);
    }

    matches(selector) {
        const [, name, value] = /^\[([\w-]+)(?:="?([\w-]+)"?)?\]$/.exec(selector) ?? [];
        if (name) return name in this.attributes && (value === undefined || this.attributes[name] === value);
        if (selector.startsWith(".")) return (this.attributes.class ?? "").split(" ").includes(selector.slice(1));
        return this.tag === selector;
    }

    querySelector(selector) {
        for (const child of this.children) {
            const found = child.matches(selector) ? child : child.querySelector(selector);
            if (found) return found;
        }
        return null;
    }

    closest(selector) {
        return this.matches(selector) ? this : (this.parentNode?.closest(selector) ?? null);
    }

    contains(node) {
        return node !== null && (node === this || this.contains(node.parentNode ?? null));
    }

    addEventListener(type, listener) {
        (this.listeners[type] ??= []).push(listener);
    }

    /** Tell this element and those around it of an event. Returns whether its usual effect was prevented. */
    fire(type, details = {}) {
        let isPrevented = false;
        const event = { target: this, preventDefault: () => (isPrevented = true), ...details };
        for (let node = this; node; node = node.parentNode) for (const listen of node.listeners[type] ?? []) listen(event);
        return isPrevented;
    }

    focus() {
        globalThis.document.activeElement = this;
        this.fire("focusin");
    }
}

for (const [property, name] of Object.entries(ATTRIBUTES)) {
    Object.defineProperty(Element.prototype, property, {
        get() {
            return this.attributes[name];
        },
        set(value) {
            this.setAttribute(name, value);
        },
    });
}

/** Make a document the global one, with elements by their ids. */
export function openDocument(byId = {}) {
    globalThis.document = {
        activeElement: null,
        documentElement: new Element("html"),
        createElement: (tag) => new Element(tag),
        createTextNode: (text) => new Text(text),
        getElementById: (id) => byId[id] ?? null,
    };
}

/** Let promises and streams do what they can do without time passing. */
export async function settle() {
    for (let turn = 0; turn < 10; turn += 1) await new Promise(setImmediate);
}
