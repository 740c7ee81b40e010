// The images of the next message: chosen, pasted or dropped, and shown as thumbnails until the message is sent.
//
//     file ──► data URL: the file itself, or scaled down as a JPEG ──► thumbnail ──► take: the message has it
//
// A photo has more pixels than models use, and the server limits the size of a request, which has the images of a whole
// conversation. So a large image is scaled down here. A small file is sent unchanged.

const MAX_EDGE = 2048; // pixels
const MAX_BYTES = 2 << 20; // of a file that is sent unchanged
const UNCHANGED = ["image/png", "image/jpeg", "image/webp"]; // of a GIF, models and users see the first frame
const QUALITY = 0.9;

/** Return the size of an image once its longer edge is at most MAX_EDGE. */
export function scaled(width, height) {
    const scale = Math.min(1, MAX_EDGE / Math.max(width, height));
    return [width, height].map((edge) => Math.max(1, Math.round(edge * scale)));
}

/** Return the data URL of an image file, scaled down if it is large. Throws if this browser cannot read it. */
export async function dataUrl(file) {
    const bitmap = await createImageBitmap(file);
    const [width, height] = scaled(bitmap.width, bitmap.height);
    const isSmall = width === bitmap.width && height === bitmap.height && file.size <= MAX_BYTES;
    try {
        return isSmall && UNCHANGED.includes(file.type) ? await unchanged(file) : jpeg(bitmap, width, height);
    } finally {
        bitmap.close();
    }
}

function jpeg(bitmap, width, height) {
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.fillStyle = "white"; // a JPEG has no transparency; the server uses white too
    context.fillRect(0, 0, width, height);
    context.drawImage(bitmap, 0, 0, width, height);
    return canvas.toDataURL("image/jpeg", QUALITY);
}

function unchanged(file) {
    return new Promise((resolve, reject) => {
        const reader = new FileReader();
        reader.onload = () => resolve(reader.result);
        reader.onerror = () => reject(reader.error);
        reader.readAsDataURL(file);
    });
}

/** Return the element that shows an image. `onload` is called when its size is known. */
export function picture({ name, url }, { onload = null } = {}) {
    return Object.assign(document.createElement("img"), { src: url, alt: name, title: name, onload });
}

/** The images attached to a form. `read(file)` returns a data URL; `onError(message)` is called for other files. */
export class Attachments {
    constructor(form, { read, onError }) {
        this.text = form.elements.text;
        this.button = form.elements.attach;
        this.list = form.querySelector("ul");
        this.voice = form.querySelector("[role=status]");
        this.read = read;
        this.onError = onError;
        this.images = [];
        this.numUnread = 0;
        this.allRead = Promise.resolve();
        this.isAllowed = false;
        const input = form.elements.images;
        this.button.addEventListener("click", () => input.click());
        input.addEventListener("change", () => {
            this.attach(input.files);
            input.value = ""; // so that the same file can be chosen again
        });
        this.text.addEventListener("paste", (event) => this.paste(event));
        this.listenForDrops(document.documentElement); // a file dropped next to the form would replace the page
    }

    /** Offer to attach images, or not. Mutates. */
    allow(isAllowed) {
        this.isAllowed = isAllowed;
        this.button.hidden = !isAllowed;
        if (!isAllowed) this.take();
    }

    paste(event) {
        const { files, types } = event.clipboardData;
        const isFormatted = types.includes("text/html") && types.includes("text/plain");
        if (!this.isAllowed || files.length === 0 || isFormatted) return; // formatted text comes with its picture
        event.preventDefault();
        this.attach(files);
    }

    listenForDrops(area) {
        const listen = (type, listener) =>
            area.addEventListener(type, (event) => {
                if (this.isAllowed && event.dataTransfer.types.includes("Files")) listener(event);
            });
        listen("dragover", (event) => {
            event.preventDefault();
            area.dataset.drop = "here";
        });
        listen("dragleave", (event) => {
            if (!event.relatedTarget) delete area.dataset.drop; // it has left the window
        });
        listen("drop", (event) => {
            event.preventDefault();
            delete area.dataset.drop;
            this.attach(event.dataTransfer.files);
        });
    }

    /** Attach files, one after the other, in their order. Mutates. */
    attach(files) {
        for (const file of files) {
            this.numUnread += 1;
            this.allRead = this.allRead.then(() => this.add(file));
        }
    }

    async add(file) {
        try {
            this.show({ name: file.name, url: await this.read(file) });
        } catch {
            this.onError(`cannot read ${file.name}; choose a PNG, JPEG, WebP or GIF image`);
        } finally {
            this.numUnread -= 1;
        }
    }

    show(image) {
        this.images.push(image);
        const remove = Object.assign(document.createElement("button"), { type: "button", textContent: "×" });
        remove.ariaLabel = remove.title = `Remove ${image.name}`;
        const item = document.createElement("li");
        item.append(picture(image), remove);
        remove.addEventListener("click", () => this.remove(image, item));
        this.list.append(item);
        this.voice.textContent = `${image.name} attached`;
    }

    remove(image, item) {
        const next = this.list.children[this.images.indexOf(image) + 1];
        this.images = this.images.filter((each) => each !== image);
        item.remove();
        this.voice.textContent = `${image.name} removed`;
        (next?.querySelector("button") ?? this.text).focus();
    }

    /** Return the attached images, and detach them. Mutates. */
    take() {
        const { images } = this;
        this.images = [];
        this.list.replaceChildren();
        this.voice.textContent = "";
        return images;
    }
}
