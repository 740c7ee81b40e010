"""Images of a prompt: which files are read, what becomes of their colours, and how they get into a conversation."""

from __future__ import annotations

import base64
import io
import json
import struct
import subprocess
import sys
import weakref
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quire.compute.models.source import ModelFolder
from quire.core.errors import CheckpointError, InvalidRequestError, RequestTooLargeError
from quire.engine.images import decoding, reader
from quire.engine.images.decoding import decoded, opened
from quire.engine.images.parts import SentImage, has_images, take_images
from quire.engine.images.reader import ImageReader
from quire.engine.images.settings import MOST_PATCHES
from quire.engine.text.chat_template import ChatOptions, ChatTemplate
from quire.engine.text.content_form import ContentForm, form_of
from quire.engine.text.prompts import Encoded, encode_chat, encode_prompt
from quire.engine.text.tokenizer import Tokenizer
from support.tiny_images import (
    CONTENT_AS_TEXT,
    FOLDERS,
    SMOLVLM,
    VOCAB_SIZE,
    asked_about,
    data_url,
    file_of,
    open_tokenizer,
    picture,
    write_folder,
)

SMALL = file_of(picture(40, 30))


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("smolvlm")
    write_folder(folder, "SmolVLM")
    return open_tokenizer(folder)


def refusal(call: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return caught.value


def read(data: bytes) -> Image.Image:
    return decoded(opened(data, "image"), "image")


def png_of(width: int, height: int, rows: bytes = b"", depth: int = 1) -> bytes:
    """Return a grey PNG that claims a size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "JPEG"])
def test_four_formats_are_read(kind: str) -> None:
    image = read(file_of(picture(40, 30), kind))
    assert (image.mode, image.size) == ("RGB", (40, 30))


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "ICO", "PPM", "TGA"])
def test_no_other_format_is_opened(kind: str) -> None:
    assert "a PNG, JPEG, WebP or GIF image" in str(refusal(lambda: read(file_of(picture(40, 30), kind))))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "JPEG"])
def test_a_file_that_was_cut_off_or_changed_is_refused_in_one_line(kind: str) -> None:
    data = file_of(picture(60, 50), kind)
    for length in (0, 1, 11, 12, 40, len(data) // 2):
        refusal(lambda length=length: read(data[:length]))
    for place in range(0, len(data), 7):
        changed = data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]
        try:
            read(changed)
        except InvalidRequestError as error:
            assert "\n" not in str(error)


def test_only_the_first_frame_of_an_animation_is_read() -> None:
    frames = [picture(20, 10, seed=seed) for seed in range(3)]
    for kind in ("WEBP", "PNG"):
        data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert read(data).tobytes() == frames[0].tobytes()


def test_the_size_is_checked_before_a_pixel_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> Any:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    assert "50000 x 50000 pixels" in str(refusal(lambda: opened(png_of(50_000, 50_000), "image")))
    assert "at most 33,554,432 pixels" in str(refusal(lambda: opened(png_of(1 << 25, 2), "image")))
    opened(png_of(1 << 13, 1 << 12), "image")


def test_an_edge_is_bounded_because_resizing_takes_memory_for_it() -> None:
    """A line of 33 million pixels, a PNG of 30 KB, took 2.5 GB and nine seconds."""
    opened(png_of(65_535, 1), "image")
    for size in ((65_536, 1), (1, 65_536)):
        error = refusal(lambda size=size: opened(png_of(*size), "image"))
        assert (error.value, error.allowed) == ("an edge of 65,536 pixels", "at most 65,535 pixels")


def test_a_file_is_at_most_32_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_IMAGE_BYTES", len(SMALL) - 1)
    assert f"an image of at most {len(SMALL) - 1:,} bytes" in str(refusal(lambda: opened(SMALL, "image")))


def test_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded() -> None:
    """Each scan of a progressive JPEG can visit all pixels, for about 60 bytes of file."""
    data = file_of(picture(64, 64), "JPEG", progressive=True)
    start = data.rindex(b"\xff\xda")
    scan = data[start:-2]
    assert read(data).size == (64, 64)
    assert "at most 64 scans" in str(refusal(lambda: read(data[:-2] + scan * 64 + data[-2:])))


def test_what_follows_a_photo_holds_no_scans() -> None:
    """Phones append a video to a photo: two bytes in it are often those of a scan."""
    data = file_of(picture(64, 64), "JPEG")
    assert read(data + b"\xff\xda\x5f\x01" * 500).tobytes() == read(data).tobytes()


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_file_of_very_many_parts_is_refused_before_it_is_read(kind: str) -> None:
    """Pillow handles each of them in Python: a file of 24 MiB could take ten seconds."""
    data = file_of(picture(8, 8), kind)
    parts = {
        "PNG": [struct.pack(">I", 0) + b"prVt" + struct.pack(">I", zlib.crc32(b"prVt"))],
        "JPEG": [b"\xff\xfe\0\x02", b"\xff", b"\xff\xd0", b"a"],
    }
    start = data.index(b"IDAT") - 4 if kind == "PNG" else 20  # behind the first segment
    for part in parts[kind]:
        assert read(data[:start] + part * 400 + data[start:]).size == (8, 8)
        assert "very many parts" in str(refusal(lambda part=part: read(data[:start] + part * 1100 + data[start:])))


def test_a_png_of_very_many_profiles_is_refused_before_it_is_read() -> None:
    """Pillow unpacks each, a KiB of file to a MiB: a file of 17 MB took 35 seconds."""
    packed = b"a\0\0" + zlib.compress(bytes(1 << 10))
    profile = struct.pack(">I", len(packed)) + b"iCCP" + packed + struct.pack(">I", zlib.crc32(b"iCCP" + packed))
    start = SMALL.index(b"IDAT") - 4
    assert read(SMALL[:start] + profile * 2 + SMALL[start:]).size == (40, 30)
    refused = refusal(lambda: read(SMALL[:start] + profile * 20 + SMALL[start:]))
    assert "at most 8 colour profiles" in str(refused)


def test_an_image_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = read(file_of(picture(40, 30), "JPEG", exif=exif))
    assert image.size == (30, 40)


def test_transparent_pixels_are_blended_with_white() -> None:
    image = Image.new("RGBA", (1, 600), (255, 0, 0, 0))
    image.putpixel((0, 599), (255, 0, 0, 255))
    found = read(file_of(image))
    assert [found.getpixel((0, row)) for row in (0, 300, 599)] == [(255,) * 3, (255,) * 3, (255, 0, 0)]


def test_grey_of_16_bits_keeps_its_highest_bits() -> None:
    rows = b"".join(b"\0" + struct.pack(">HH", 200 * 256 + 7, 13 * 256) for _ in range(2))
    image = read(png_of(2, 2, rows, depth=16))
    assert [image.getpixel((column, 1)) for column in (0, 1)] == [(200,) * 3, (13,) * 3]


def test_importing_it_loads_no_decoder() -> None:
    code = "import sys, quire.engine.text.prompts, quire.engine.images.reader; print('PIL' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


# --- parts of a message --------------------------------------------------------------------------


def test_an_image_can_be_given_in_many_forms(tmp_path: Path, smolvlm: Tokenizer) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(SMALL)
    text = base64.b64encode(SMALL).decode()
    forms = [SMALL, bytearray(SMALL), path, picture(40, 30), text, text.rstrip("="), data_url(SMALL), f"{text[:9]}\n"]
    forms[-1] += text[9:]
    found = [encode_prompt(asked_about(form), smolvlm) for form in forms]
    url = {"type": "image_url", "image_url": {"url": data_url(SMALL), "detail": "low"}}
    found.append(
        encode_prompt([{"role": "user", "content": [url, {"type": "text", "text": "What is this?"}]}], smolvlm)
    )
    assert all(each == found[0] for each in found)
    assert len(found[0].images) == 13


def test_base64_is_decoded_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding 32 MiB at once would stop the event loop for a tenth of a second."""
    lengths, real = list[int](), base64.b64decode

    def decode(text: str, **options: Any) -> bytes:
        lengths.append(len(text))
        return real(text, **options)

    monkeypatch.setattr("quire.engine.images.parts.base64.b64decode", decode)
    data = bytes(range(256)) * 20_000
    text = base64.b64encode(data).decode()
    for sent in (text, text.rstrip("="), "\n".join(text[at : at + 76] for at in range(0, len(text), 76))):
        assert SentImage("image", sent).content() == data
    assert max(lengths) <= 1 << 20 and len(lengths) == 21
    for broken in (f"{text[:1000]}={text[1000:]}", f"{text[:-3]}!==", "=" * 8 + text, f"{text}é"):
        assert "base64" in str(refusal(lambda broken=broken: SentImage("image", broken).content()))


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/cat.png", "https://example.org/cat.png", "file:///etc/passwd", "ftp://a/b", "HTTP://a"]
)
def test_nothing_is_fetched(smolvlm: Tokenizer, url: str) -> None:
    for part in ({"type": "image_url", "image_url": {"url": url}}, {"type": "image", "image": url}):
        error = refusal(lambda part=part: encode_prompt([{"role": "user", "content": [part]}], smolvlm))
        assert "nothing is fetched from other places" in str(error)
        assert error.field.startswith("messages[0].content[0]")


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        ("/etc/passwd", "PNG"),
        ("cat.png", "base64"),
        ("", "PNG"),
        ("data:image/png,abc", "a data URL such as"),
        ("data:image/png;base64", "a data URL such as"),
        ("data:image/png;base64,%%%%", "base64"),
        ("data:image/png;base64,é", "base64"),
        (None, "bytes, a pathlib.Path"),
        (7, "bytes, a pathlib.Path"),
        ({}, "bytes, a pathlib.Path"),
        (Path("/nowhere/cat.png"), "a file that can be read"),
        (Path("/dev/zero"), "a plain file"),
        (b"", "a PNG, JPEG, WebP or GIF image"),
    ],
)
def test_what_is_no_image_is_refused(smolvlm: Tokenizer, value: Any, allowed: str) -> None:
    assert allowed in refusal(lambda: encode_prompt(asked_about(value), smolvlm)).allowed


@pytest.mark.parametrize("key", ["url", "path", "base64"])
def test_a_part_for_an_image_has_it_under_its_own_name(smolvlm: Tokenizer, key: str) -> None:
    messages = [{"role": "user", "content": [{"type": "image", key: "cat.png"}]}]
    error = refusal(lambda: encode_prompt(messages, smolvlm))
    assert error.value == f"a part with type, {key}" and error.allowed.endswith('in "image"')


def test_an_error_names_a_file_once(smolvlm: Tokenizer) -> None:
    error = refusal(lambda: encode_prompt(asked_about(Path("/nowhere/cat.png")), smolvlm))
    assert error.value == "/nowhere/cat.png: No such file or directory"


@pytest.mark.parametrize("url", [None, 7, {}, {"url": None}, {"url": 7}, {"url": "aGk="}, "cat.png", [], {"url": []}])
def test_an_image_url_is_a_data_url(smolvlm: Tokenizer, url: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
    assert "a data URL such as data:image/png;base64,…" in str(refusal(lambda: encode_prompt(messages, smolvlm)))


def test_images_are_taken_out_of_a_conversation() -> None:
    messages = asked_about(b"a", b"b")
    plain, sent = take_images(messages)
    assert sent == [SentImage("messages[0].content[0]", b"a"), SentImage("messages[0].content[1]", b"b")]
    assert plain == [{"role": "user", "content": [{"type": "image"}] * 2 + messages[0]["content"][2:]}]
    assert has_images(messages) and has_images(tuple(messages)) and not has_images(messages[0])
    odd: list[Any] = [{"role": "user", "content": [7, None]}, {"content": "image"}, {"content": {"type": "image"}}, 7]
    assert take_images(odd) == (odd, []) and not has_images(odd)


# --- conversations -------------------------------------------------------------------------------


def test_no_client_can_write_the_tokens_of_an_image(smolvlm: Tokenizer) -> None:
    messages = asked_about(SMALL, text="<image><fake_token_around_image> <image")
    found = encode_prompt(messages, smolvlm)
    own = smolvlm.id_of("<image>")
    assert found.token_ids.tolist().count(own) == 13 * 5
    assert all(found.token_ids[each.start : each.end].tolist() == [own] * 5 for each in found.images)
    assert "<image><fake_token_around_image> <image" in smolvlm.decode(found.token_ids, skip_special_tokens=False)


def test_equal_images_have_equal_tokens_and_digests(smolvlm: Tokenizer) -> None:
    twice = encode_prompt(asked_about(SMALL, SMALL), smolvlm)
    once = encode_prompt(asked_about(file_of(picture(40, 30), "PNG", compress_level=0)), smolvlm)
    digests = [each.digest for each in twice.images]
    assert digests[:13] == digests[13:] == [each.digest for each in once.images]
    other = encode_prompt(asked_about(file_of(picture(40, 30, seed=1))), smolvlm)
    assert not {each.digest for each in other.images} & set(digests)


def test_a_conversation_without_images_is_written_as_before(smolvlm: Tokenizer) -> None:
    (first, last) = [[{"role": "user", "content": content}] for content in ("Hi", [{"type": "text", "text": "Hi"}])]
    found = encode_prompt(first, smolvlm)
    assert found == encode_prompt(last, smolvlm) and not found.images
    assert smolvlm.decode(found.token_ids, skip_special_tokens=False) == (
        "<|im_start|>User: Hi<end_of_utterance>\nAssistant:"
    )


def test_the_last_message_can_be_continued(smolvlm: Tokenizer) -> None:
    messages = [*asked_about(SMALL), {"role": "assistant", "content": "It is "}]
    found = encode_prompt(messages, smolvlm, ChatOptions(continue_final_message=True))
    assert smolvlm.decode(found.token_ids).endswith("Assistant: It is ") and len(found.images) == 13


def test_a_template_of_texts_gets_the_image_in_its_place(tmp_path: Path) -> None:
    write_folder(tmp_path, "SmolVLM", template=CONTENT_AS_TEXT, do_image_splitting=False)
    tokenizer = open_tokenizer(tmp_path)
    found = encode_prompt(asked_about(SMALL, text="<image>?"), tokenizer)
    text = tokenizer.decode(found.token_ids, skip_special_tokens=False)
    around, whole = "<fake_token_around_image>", "<global-img>" + "<image>" * 5
    assert text == f"<|im_start|>{around}{whole}{around}\n<image>?<end_of_utterance>"
    alone = encode_prompt([{"role": "user", "content": asked_about(SMALL)[0]["content"][:1]}], tokenizer)
    assert tokenizer.decode(alone.token_ids, skip_special_tokens=False) == text.replace("<image>?", "")


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (SMOLVLM, ContentForm.PARTS),
        (CONTENT_AS_TEXT, ContentForm.TEXT),
        ("{{ raise_exception('no') }}", ContentForm.TEXT),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
            "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}",
            ContentForm.BOTH,
        ),
    ],
)
def test_the_form_of_contents_is_found_by_a_trial(source: str, form: ContentForm) -> None:
    assert form_of(ChatTemplate(source, {}), "<image>") is form


def test_a_template_that_takes_no_texts_gets_parts_even_without_images(tmp_path: Path, smolvlm: Tokenizer) -> None:
    """Else a model whose images an engine does not read would be asked nothing at all."""
    write_folder(tmp_path, "SmolVLM")
    tokenizer = Tokenizer.open(ModelFolder(tmp_path), vocab_size=512)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    assert encode_prompt(messages, tokenizer) == encode_prompt(messages, smolvlm)
    assert "Hi" in tokenizer.decode(tokenizer.encode_chat(messages))


def test_an_image_that_the_template_does_not_write_is_refused(tmp_path: Path) -> None:
    template = SMOLVLM.replace("line['type'] == 'image'", "line['type'] == 'image' and message.role == 'user'")
    write_folder(tmp_path, "SmolVLM", template=template)
    tokenizer = open_tokenizer(tmp_path)
    messages = [{"role": "assistant", "content": asked_about(SMALL)[0]["content"]}]
    error = refusal(lambda: encode_prompt(messages, tokenizer))
    assert "its chat template wrote 0 of them" in str(error)


def test_a_model_without_images_refuses_them_as_before(tmp_path: Path) -> None:
    write_folder(tmp_path, "SmolVLM")
    tokenizer = Tokenizer.open(ModelFolder(tmp_path), vocab_size=512)
    for image in (data_url(SMALL), SMALL, Path("cat.png")):
        error = refusal(lambda image=image: encode_prompt(asked_about(image), tokenizer))
        assert (error.field, error.value) == ("messages[0].content[0].type", "image")
        assert error.allowed == "'text': this model reads text only"


def test_other_parts_are_still_refused(smolvlm: Tokenizer) -> None:
    content = [*asked_about(SMALL)[0]["content"], {"type": "input_audio", "input_audio": {}}]
    error = refusal(lambda: encode_prompt([{"role": "user", "content": content}], smolvlm))
    assert error.field == "messages[0].content[2].type"
    assert error.allowed == "'text', 'image' or 'image_url': other parts are not supported"


def test_images_have_limits(smolvlm: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "at most 64 images" in str(refusal(lambda: encode_prompt(asked_about(*[SMALL] * 65), smolvlm)))
    monkeypatch.setattr(reader, "MAX_ALL_PIXELS", 3 * 1200)
    encode_prompt(asked_about(*[SMALL] * 3), smolvlm)
    assert "images of at most 3,600 pixels" in str(refusal(lambda: encode_prompt(asked_about(*[SMALL] * 4), smolvlm)))


def test_no_image_is_opened_behind_too_many_pixels(smolvlm: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open GIF has a byte for each pixel in memory."""
    sizes = []

    def noted(data: bytes, where: str) -> Any:
        image = opened(data, where)
        sizes.append(image.size)
        return image

    monkeypatch.setattr(reader, "MAX_ALL_PIXELS", 3000)
    monkeypatch.setattr(reader, "opened", noted)
    files = [file_of(picture(50, 40), "GIF")] * 9
    with pytest.raises(InvalidRequestError, match="images of 4,000 pixels"):
        encode_prompt(asked_about(*files), smolvlm)
    assert len(sizes) == 2


def test_one_image_of_a_request_is_decoded_at_a_time(smolvlm: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[weakref.ref[Image.Image]] = []

    def watched(image: Image.Image, where: str) -> Image.Image:
        assert not [each for each in begun if each() is not None], "another one still has its pixels"
        begun.append(weakref.ref(image))
        return decoded(image, where)

    monkeypatch.setattr(reader, "decoded", watched)
    encode_prompt(asked_about(*[SMALL] * 3), smolvlm)
    assert len(begun) == 3


def test_the_resized_pixels_of_a_request_are_bounded(smolvlm: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_TILE_BYTES", 300_000)
    with pytest.raises(RequestTooLargeError, match="allowed: images of at most 300,000 bytes of pixels after resizing"):
        encode_prompt(asked_about(*[SMALL] * 3), smolvlm)


def test_images_that_cannot_fit_the_context_are_refused_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, "SmolVLM")
    tokenizer = open_tokenizer(tmp_path, max_tokens=13 * 5 * 2)
    encode_prompt(asked_about(SMALL, SMALL), tokenizer)
    monkeypatch.setattr(reader, "decoded", None)
    with pytest.raises(RequestTooLargeError, match="images of 195 tokens'; allowed: at most 130 tokens, the context"):
        encode_prompt(asked_about(SMALL, SMALL, SMALL), tokenizer)


def test_messages_can_be_adapted(smolvlm: Tokenizer) -> None:
    def adapt(messages: Any, tools: Any) -> Any:
        assert messages[0]["content"][0] == {"type": "image"}
        return [*messages, {"role": "assistant", "content": "Yes"}], tools

    found = encode_chat(asked_about(SMALL), smolvlm, ChatOptions(), adapt)
    assert "Assistant: Yes" in smolvlm.decode(found.token_ids) and len(found.images) == 13


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"image_processor_type": "OtherImageProcessor"}, "image_processor_type"),
        ({"image_processor_type": 7}, "image_processor_type"),
        ({"size": {"longest_edge": 1 << 30}}, "size.longest_edge"),
        ({"size": {"longest_edge": -1}}, "size.longest_edge"),
        ({"size": []}, "size"),
        ({"max_image_size": {"longest_edge": 1}}, "max_image_size"),
        ({"resample": 6}, "resample"),
        ({"resample": "x"}, "resample"),
        ({"do_image_splitting": 1}, "do_image_splitting"),
    ],
)
def test_settings_have_bounds(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    write_folder(tmp_path, "SmolVLM", **changes)
    with pytest.raises(CheckpointError) as caught:
        ImageReader.open(ModelFolder(tmp_path), max_tokens=100)
    assert caught.value.field.endswith(f"json: {field}")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_patches": 65}, "max_patches"),
        ({"min_patches": 5, "max_patches": 4}, "min_patches"),
        ({"size": {"height": 4096, "width": 4096}}, "max_patches"),
    ],
)
def test_settings_of_internvl_have_bounds(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    write_folder(tmp_path, "InternVL", **changes)
    with pytest.raises(CheckpointError) as caught:
        ImageReader.open(ModelFolder(tmp_path), max_tokens=100)
    assert caught.value.field.endswith(f"json: {field}")


def test_one_file_can_have_all_settings(tmp_path: Path) -> None:
    write_folder(tmp_path, "SmolVLM")
    expected = encode_prompt(asked_about(SMALL), open_tokenizer(tmp_path))
    made = FOLDERS["SmolVLM"]
    (tmp_path / "preprocessor_config.json").unlink()
    whole = made["processor_config.json"] | {"image_processor": made["preprocessor_config.json"]}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    assert encode_prompt(asked_about(SMALL), open_tokenizer(tmp_path)) == expected


def test_the_vocabulary_must_have_the_tokens_of_images(tmp_path: Path) -> None:
    write_folder(tmp_path, "SmolVLM")
    files = tmp_path / "tokenizer.json"
    files.write_text(files.read_text().replace("<fake_token_around_image>", "<other>"))
    with pytest.raises(CheckpointError, match="a tokenizer without <fake_token_around_image>"):
        open_tokenizer(tmp_path)


def test_the_vocabulary_and_the_model_must_agree_on_the_token_of_images(tmp_path: Path) -> None:
    write_folder(tmp_path, "SmolVLM")
    files = ModelFolder(tmp_path)
    token = open_tokenizer(tmp_path).id_of("<image>")
    assert token is not None
    for placeholder in (token, None):
        images = ImageReader.open(files, max_tokens=100, placeholder_id=placeholder)
        assert Tokenizer.open(files, vocab_size=VOCAB_SIZE, images=images).images is images
    images = ImageReader.open(files, max_tokens=100, placeholder_id=token + 1)
    with pytest.raises(CheckpointError, match=f"<image> is {token}; allowed: {token + 1}, the token of images"):
        Tokenizer.open(files, vocab_size=VOCAB_SIZE, images=images)


def test_an_image_of_pillow_stays_as_it_is(smolvlm: Tokenizer) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = file_of(picture(40, 30), "JPEG", exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        assert encode_prompt(asked_about(image), smolvlm) == encode_prompt(asked_about(data), smolvlm)
        assert image.size == (40, 30)


# --- families ------------------------------------------------------------------------------------


def prompt_of(folder: Path, family: str, image: Image.Image, **changes: Any) -> tuple[str, Encoded]:
    write_folder(folder, family, **changes)
    tokenizer = open_tokenizer(folder)
    found = encode_prompt(asked_about(image), tokenizer)
    return tokenizer.decode(found.token_ids, skip_special_tokens=False), found


def test_smolvlm_writes_rows_of_tiles_and_the_whole(tmp_path: Path) -> None:
    text, found = prompt_of(tmp_path, "SmolVLM", picture(128, 60), size={"longest_edge": 128})
    around, own = "<fake_token_around_image>", "<image>" * 5
    tiles = f"{around}<row_1_col_1>{own}{around}<row_1_col_2>{own}\n\n{around}<global-img>{own}{around}"
    assert text == f"<|im_start|>User:{tiles}What is this?<end_of_utterance>\nAssistant:"
    assert [(each.height, each.width, each.num_tokens) for each in found.images] == [(64, 64, 5)] * 3


def test_internvl_writes_all_tiles_between_two_tokens(tmp_path: Path) -> None:
    text, found = prompt_of(tmp_path, "InternVL", picture(120, 60))
    assert "<img>" + "<IMG_CONTEXT>" * 4 * 3 + "</img>\nWhat" in text
    assert [(each.height, each.width, each.num_tokens) for each in found.images] == [(56, 56, 4)] * 3


def test_llava_cuts_a_square_from_the_middle(tmp_path: Path) -> None:
    text, found = prompt_of(tmp_path, "LLaVA", picture(300, 60))
    assert text == "USER: " + "<image>" * 16 + "\nWhat is this? ASSISTANT:"
    assert [(each.height, each.width, each.num_tokens) for each in found.images] == [(56, 56, 16)]


def test_llava_next_has_tokens_for_the_lines_that_show_the_image(tmp_path: Path) -> None:
    sizes = {(112, 56): 4 * (8 + 1), (112, 30): 2 * (8 + 1), (30, 112): 8 * (2 + 1), (400, 2): None}
    for size, tokens in sizes.items():
        text, found = prompt_of(tmp_path, "LLaVA-NeXT", picture(*size))
        assert f"USER: {'<image>' * (16 + (tokens or 0))}\nWhat" in text
        assert [each.num_tokens for each in found.images] == [16, *([tokens] if tokens else [])]
        assert (found.images[0].height, found.images[0].width) == (56, 56)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"image_grid_pinpoints": []}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": [[56, 100]]}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": [[56, 112, 56]]}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": [[560, 560]]}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": [[56 << 40, 56]]}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": 7}, "image_grid_pinpoints"),
        ({"crop_size": {"height": 28, "width": 28}}, "crop_size"),
        ({"size": {"shortest_edge": 4096}, "crop_size": 4096, "patch_size": 1}, "patch_size"),
    ],
)
def test_settings_of_llava_next_have_bounds(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    write_folder(tmp_path, "LLaVA-NeXT", **{"patch_size": 14, **changes})
    (tmp_path / "processor_config.json").write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        ImageReader.open(ModelFolder(tmp_path), max_tokens=100)
    assert caught.value.field.endswith(f"json: {field}")


def test_glm_4v_counts_the_pixels_of_two_frames(tmp_path: Path) -> None:
    for size, tokens in (((28, 28), 9), ((210, 210), 49), ((900, 60), 29)):
        text, found = prompt_of(tmp_path, "GLM-4V", picture(*size))
        assert f"<|begin_of_image|>{'<|image|>' * tokens}<|end_of_image|>What" in text
        assert [each.num_tokens for each in found.images] == [tokens]
    for changes in ({"size": {"shortest_edge": 91_000, "longest_edge": 90_000}}, {"patch_size": 200}):
        write_folder(tmp_path, "GLM-4V", **changes)
        with pytest.raises(CheckpointError, match=r"size\.longest_edge is 90000"):
            ImageReader.open(ModelFolder(tmp_path), max_tokens=100)


@pytest.mark.parametrize("size", [(1 << 20, 1), (1, 1 << 20)])
def test_llava_refuses_an_image_that_would_become_too_long(tmp_path: Path, size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequestError, match="an image whose edges differ less"):
        prompt_of(tmp_path, "LLaVA", Image.new("L", size))


def test_llava_pads_no_image_to_a_very_large_square(tmp_path: Path) -> None:
    """A strip of 65,535 × 1 pixels would become a square of 17 GB."""
    pads = {"image_processor_type": "LlavaImageProcessor", "do_pad": True}
    write_folder(tmp_path, "LLaVA", **pads)
    tokenizer = open_tokenizer(tmp_path)
    assert encode_prompt(asked_about(Image.new("L", (8_000, 10))), tokenizer).images
    with pytest.raises(InvalidRequestError, match="an image whose edges differ less"):
        encode_prompt(asked_about(Image.new("L", (20_000, 10))), tokenizer)


def test_the_size_of_patches_may_be_in_the_settings_of_the_model(tmp_path: Path) -> None:
    expected = prompt_of(tmp_path, "LLaVA", picture(60, 60))
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {"patch_size": 14}}))
    assert encode_prompt(asked_about(picture(60, 60)), open_tokenizer(tmp_path)) == expected[1]


def test_pixtral_ends_each_row_of_patches(tmp_path: Path) -> None:
    text, found = prompt_of(tmp_path, "Pixtral", picture(40, 20))
    row = "[IMG]" * 3
    assert text == f"<s>[INST]{row}[IMG_BREAK]{row}[IMG_END]What is this?[/INST]"
    assert [(each.start, each.height, each.width, each.num_tokens) for each in found.images] == [(2, 32, 48, 8)]


def test_gemma_makes_one_square_whose_tokens_belong_together(tmp_path: Path) -> None:
    text, found = prompt_of(tmp_path, "Gemma 3", picture(300, 60))
    image = "\n\n<start_of_image>" + "<image_soft_token>" * 20 + "<end_of_image>\n\n"
    turn = f"<start_of_turn>user\n{image}What is this?<end_of_turn>\n"
    assert text == f"{turn}<start_of_turn>model\n"
    assert [(each.height, each.width, each.num_tokens, each.is_whole) for each in found.images] == [(56, 70, 20, True)]


def test_qwen_keeps_the_shape_of_an_image(tmp_path: Path) -> None:
    text, found = prompt_of(tmp_path, "Qwen2-VL", picture(90, 55))
    assert text.startswith("<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>What")
    assert [(each.height, each.width, each.num_tokens) for each in found.images] == [(56, 84, 6)]
    with pytest.raises(InvalidRequestError, match="an image at most 200 times as long as wide"):
        prompt_of(tmp_path, "Qwen2-VL", picture(201, 1))


def test_an_image_is_resized_to_what_the_encoder_takes(tmp_path: Path) -> None:
    """Qwen2-VL may have 65,536 patches, of which the encoder here takes a quarter: a photo must not be refused."""
    write_folder(tmp_path, "Qwen2-VL", max_pixels=12_845_056)
    files = ModelFolder(tmp_path)
    for most, size in ((MOST_PATCHES, (392, 588)), (1 << 10, (364, 532)), (100, (112, 168))):
        images = ImageReader.open(files, max_tokens=1 << 20, max_patches=most)
        tokenizer = Tokenizer.open(files, vocab_size=512, images=images)
        [found] = encode_prompt(asked_about(picture(600, 400)), tokenizer).images
        assert (found.height, found.width) == size and found.height * found.width <= most * 14**2


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("Gemma 3", {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("Gemma 3", {"size": {"height": 56}, "crop_size": None}, ""),
        ("Qwen2-VL", {"min_pixels": 60_000}, "max_pixels"),
        ("Qwen2-VL", {"max_pixels": 1 << 26}, "max_pixels"),
        ("Qwen2-VL", {"max_pixels": 100, "min_pixels": 1}, "max_pixels"),
        ("Qwen2-VL", {"merge_size": 17}, "merge_size"),
        ("LLaVA", {"do_center_crop": False}, "do_center_crop"),
        ("LLaVA", {"crop_size": {"height": 0, "width": 1}}, "crop_size.height"),
        ("LLaVA", {"image_mean": [0.5, 0.5]}, "image_mean"),
        ("LLaVA", {"image_mean": [0.5, 0.5, 2]}, "image_mean"),
        ("Pixtral", {"patch_size": {"height": 5000}}, ""),
    ],
)
def test_settings_of_families_have_bounds(tmp_path: Path, family: str, changes: dict[str, Any], field: str) -> None:
    write_folder(tmp_path, family, **changes)
    if not field:
        open_tokenizer(tmp_path)
        return
    with pytest.raises(CheckpointError) as caught:
        open_tokenizer(tmp_path)
    assert caught.value.field.endswith(f"json: {field}")


@pytest.mark.parametrize(
    ("size", "tiles", "whole"),
    [
        ((64, 64), (), (64, 64)),
        ((1, 1), (), (64, 64)),
        ((640, 90), (1, 7), (32, 320)),
        ((300, 200), (2, 3), (96, 128)),
        ((200, 300), (3, 2), (128, 96)),
        ((180, 180), (3, 3), (128, 128)),
        ((31, 500), (), (512, 32)),
    ],
)
def test_lfm2_cuts_large_images(
    tmp_path: Path, size: tuple[int, int], tiles: tuple[int, ...], whole: tuple[int, int]
) -> None:
    """Recorded from the processor of transformers, which needs torchvision."""
    text, found = prompt_of(tmp_path, "LFM2-VL", picture(*size))
    rows, columns = tiles or (0, 0)
    assert [(each.height, each.width) for each in found.images] == [(64, 64)] * (rows * columns) + [whole]
    assert [each.num_tokens for each in found.images] == [4] * (rows * columns) + [whole[0] * whole[1] // 1024]
    with pytest.raises(InvalidRequestError, match="an image whose edges differ less"):
        prompt_of(tmp_path, "LFM2-VL", picture(623, 3))
    assert text.count("<|img_thumbnail|>") == bool(tiles)
    if tiles:
        assert f"<|img_row_{rows}_col_{columns}|><image><image><image><image><|img_thumbnail|>" in text
        assert f"<|img_row_{rows + 1}_" not in text and f"_col_{columns + 1}|>" not in text


def test_a_size_that_the_encoder_does_not_take_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "Pixtral")
    files = ModelFolder(tmp_path)
    images = ImageReader.open(files, max_tokens=100, num_rows=lambda height, width, _: height * width // 256 % 64)
    tokenizer = Tokenizer.open(files, vocab_size=512, images=images)
    assert len(encode_prompt(asked_about(picture(64, 64)), tokenizer).images) == 1
    with pytest.raises(InvalidRequestError, match="resized to 128 x 128 pixels'; allowed: a size that the"):
        encode_prompt(asked_about(picture(128, 128)), tokenizer)


def test_an_image_of_very_few_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="an image of at least 4 tokens"):
        prompt_of(tmp_path, "Pixtral", picture(32, 16))


@pytest.mark.parametrize("family", FOLDERS)
def test_images_of_extreme_shapes_have_bounded_tiles(tmp_path: Path, family: str) -> None:
    write_folder(tmp_path, family)
    tokenizer = open_tokenizer(tmp_path)
    for size in ((1 << 20, 1), (1, 1 << 20), (1 << 11, 1 << 10)):
        try:
            found = encode_prompt(asked_about(Image.new("1", size)), tokenizer)
        except InvalidRequestError as error:
            assert "pixels" in str(error.value) or "tokens" in str(error.value)
        else:
            assert sum(len(each.pixels) for each in found.images) < 1 << 20
