"""Text of tokens as they come: every cut gives the text of all tokens at once, and that is the library's."""

from __future__ import annotations

import re
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models
from tokenizers import Tokenizer as Library

from quire.core.errors import InvariantError
from quire.engine.text.detokenizer import IncrementalDetokenizer
from quire.engine.text.tokenizer import Tokenizer
from support.tiny_tokenizer import byte_fallback, byte_level, unigram, word_piece

BYTE_LEVEL, BYTE_FALLBACK, UNIGRAM, WORD_PIECE = byte_level(), byte_fallback(), unigram(), word_piece()
LIBRARIES = {"byte level": BYTE_LEVEL, "byte fallback": BYTE_FALLBACK, "unigram": UNIGRAM, "word piece": WORD_PIECE}
TOKENIZERS = {name: Tokenizer(library) for name, library in LIBRARIES.items()}
BYTEWISE = ("byte level", "byte fallback", "unigram")
FAMILY = "👩\u200d👩\u200d👧\u200d👦"
TRICKY = st.sampled_from(
    [FAMILY, "e\u0301", "日本語", "🇨🇭", "\ufffd", "\u0000", "▁", "Ġ", " ", "  ", "\r\n", "<0x41>", "😀"]
)
TEXTS = st.lists(st.one_of(TRICKY, st.text(max_size=4)), max_size=8).map("".join)
CUTS = st.lists(st.integers(0, 999), max_size=6)


def raw_ids(library: Library) -> st.SearchStrategy[list[int]]:
    """Any tokens, bytes of no character and ids that do not exist among them."""
    return st.lists(st.integers(0, library.get_vocab_size() + 2), max_size=24)


def pieces_of(tokenizer: Tokenizer, ids: list[int], cuts: list[int], **options) -> list[str]:
    """The pieces of text of a stream that is fed in chunks, one of them empty now and then."""
    stream = IncrementalDetokenizer(tokenizer, options.pop("prompt", ()), **options)
    places = [0, *sorted(place % (len(ids) + 1) for place in cuts), len(ids)]
    chunks = [ids[start:end] for start, end in pairwise(places)]
    return [*map(stream.append, chunks), stream.finish()]


def expected(library: Library, ids: list[int], skip: bool) -> str:
    """What the library gives; where a run of byte tokens is no UTF-8, only the bad bytes are replaced."""
    known = [token for token in ids if library.id_to_token(token) is not None]
    special = {token for token, added in library.get_added_tokens_decoder().items() if added.special}
    shown = [token for token in known if not (skip and token in special)]
    if "ByteFallback" not in str(library.decoder):
        return library.decode(shown, skip_special_tokens=False)
    runs = re.findall(r"(?:<0x[0-9A-F]{2}>)+", "".join(library.id_to_token(token) for token in shown))
    valid = all(_is_utf8(bytes.fromhex(run.replace("<0x", "").replace(">", ""))) for run in runs)
    return library.decode(shown, skip_special_tokens=False) if valid else _with_bad_bytes(library, shown)


def _is_utf8(data: bytes) -> bool:
    return data.decode("utf-8", "ignore").encode() == data


def _with_bad_bytes(library: Library, ids: list[int]) -> str:
    """The library's text of the same tokens, with letters in place of what the bytes of each run say."""
    data, first = b"", True
    for token in map(library.id_to_token, ids):
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            data += bytes.fromhex(match[1])
        else:
            marks = "" if first and "Metaspace" in str(library.decoder) else " "
            data += token.replace("▁", marks).encode()
        first = False
    text = data.decode("utf-8", "replace")
    return text[1:] if "Strip" in str(library.decoder) and text.startswith(" ") else text


@pytest.mark.parametrize("name", BYTEWISE)
@given(data=st.data(), cuts=CUTS, skip=st.booleans())
def test_any_tokens_in_any_cut(name, data, cuts, skip):
    ids = data.draw(raw_ids(LIBRARIES[name]))
    text = "".join(pieces_of(TOKENIZERS[name], ids, cuts, skip_special_tokens=skip))
    assert text == TOKENIZERS[name].decode(ids, skip_special_tokens=skip) == expected(LIBRARIES[name], ids, skip)


@pytest.mark.parametrize("name", BYTEWISE)
@given(text=TEXTS, cuts=CUTS)
def test_text_comes_back(name, text, cuts):
    ids = LIBRARIES[name].encode(text, add_special_tokens=False).ids
    known = LIBRARIES[name].decode(ids, skip_special_tokens=False)
    assert "".join(pieces_of(TOKENIZERS[name], ids, cuts, skip_special_tokens=False)) == known
    if name == "byte level":
        assert known == text


@pytest.mark.parametrize("name", BYTEWISE)
@given(data=st.data(), at=st.integers(0, 99), cuts=CUTS)
def test_after_a_prompt_the_text_goes_on(name, data, at, cuts):
    """Spaces between prompt and output stay, and a character may begin in one and end in the other."""
    tokenizer, ids = TOKENIZERS[name], data.draw(raw_ids(LIBRARIES[name]))
    prompt, output = ids[: at % (len(ids) + 1)], ids[at % (len(ids) + 1) :]
    text = "".join(pieces_of(tokenizer, output, cuts, prompt=prompt))
    whole = "".join(pieces_of(tokenizer, ids, cuts))
    complete = IncrementalDetokenizer(tokenizer).append(prompt)
    assert complete + text == whole


@pytest.mark.parametrize("name", BYTEWISE)
@given(text=TEXTS)
def test_only_whole_characters_go_out_and_no_later_than_their_last_byte(name, text):
    ids = LIBRARIES[name].encode(text, add_special_tokens=False).ids
    stream, shown, data = IncrementalDetokenizer(TOKENIZERS[name], [5], skip_special_tokens=False), "", b""
    for token in ids:
        shown += stream.append([token])
        data += TOKENIZERS[name].token_bytes(token)
        assert shown == data.decode("utf-8", "ignore")
    assert stream.finish() == ""


@given(words=st.lists(st.integers(0, 8), max_size=16), cuts=CUTS, skip=st.booleans())
def test_a_decoder_that_joins_tokens_is_asked_for_a_window(words, cuts, skip):
    tokenizer = TOKENIZERS["word piece"]
    assert tokenizer.bytes_of_tokens is None
    text = "".join(pieces_of(tokenizer, words, cuts, skip_special_tokens=skip))
    assert text == tokenizer.decode(words, skip_special_tokens=skip) == WORD_PIECE.decode(words)


@given(data=st.data(), cuts=CUTS)
def test_a_tokenizer_without_a_decoder(data, cuts):
    library = byte_fallback()
    library.decoder = None
    tokenizer, ids = Tokenizer(library), data.draw(raw_ids(library))
    assert "".join(pieces_of(tokenizer, ids, cuts)) == tokenizer.decode(ids) == library.decode(ids)


@given(data=st.data(), cuts=CUTS)
def test_a_window_holds_incomplete_characters_back(data, cuts):
    """The same byte-level tokenizer by the other way, which is to give the same text."""
    library = byte_level()
    library.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("~", 0, 0)])
    tokenizer, ids = Tokenizer(library), data.draw(raw_ids(library))
    assert tokenizer.bytes_of_tokens is None
    assert "".join(pieces_of(tokenizer, ids, cuts)) == TOKENIZERS["byte level"].decode(ids)


def test_an_emoji_goes_out_with_its_last_byte():
    ids = BYTE_LEVEL.encode("😁!").ids
    stream = IncrementalDetokenizer(TOKENIZERS["byte level"], ids)
    assert [stream.append([token]) for token in ids] == ["", "😁", "!"]
    assert pieces_of(TOKENIZERS["byte level"], ids[:1], []) == ["", "\ufffd"]


def test_good_characters_stay_where_the_last_one_is_cut_off():
    """The library replaces all seven bytes; a stream has shown the first two characters by then."""
    ids = [3 + byte for byte in "你好".encode() + b"\xe4"]
    assert BYTE_FALLBACK.decode(ids) == "\ufffd" * 7
    assert TOKENIZERS["byte fallback"].decode(ids) == "你好\ufffd"


def test_a_model_that_writes_the_replacement_character_is_not_held_back():
    ids = BYTE_LEVEL.encode("\ufffd\ufffd").ids
    stream = IncrementalDetokenizer(TOKENIZERS["byte level"])
    assert stream.append(ids) == "\ufffd\ufffd"


def test_the_space_before_an_output_is_kept_only_after_a_prompt():
    tokenizer, hello = TOKENIZERS["byte fallback"], BYTE_FALLBACK.token_to_id("▁hello")
    assert "".join(pieces_of(tokenizer, [hello], [])) == "hello"
    assert "".join(pieces_of(tokenizer, [hello], [], prompt=[hello])) == " hello"
    assert "".join(pieces_of(tokenizer, [hello], [], prompt=[1])) == "hello"  # the prompt shows nothing


def test_a_stream_ends_once():
    stream = IncrementalDetokenizer(TOKENIZERS["byte level"])
    stream.append(BYTE_LEVEL.encode("😁").ids[:1])
    assert [stream.finish(), stream.finish()] == ["\ufffd", ""]
    with pytest.raises(InvariantError):
        stream.append([0])


def test_a_character_may_begin_three_tokens_before_the_output():
    library = byte_level(words=())
    ids = library.encode("a😀").ids
    assert "".join(pieces_of(Tokenizer(library), ids[4:], [], prompt=ids[:4])) == "😀"


def test_an_added_token_outside_of_the_alphabet_stands_as_it_is():
    library = byte_level(control=["<▁é end▁>"])
    ids = library.encode("é<▁é end▁>é").ids
    text = "".join(pieces_of(Tokenizer(library), ids, [1, 2], skip_special_tokens=False))
    assert text == library.decode(ids, skip_special_tokens=False) == "é<▁é end▁>é"


@pytest.mark.parametrize("step", [decoders.Replace("ab", "c"), decoders.Replace(Regex("a"), "c"), decoders.CTC()])
def test_a_decoder_that_looks_across_tokens_is_not_taken_for_one_that_does_not(step):
    library = byte_fallback()
    library.decoder = decoders.Sequence([decoders.Fuse(), step])
    assert Tokenizer(library).bytes_of_tokens is None


def test_a_window_stays_small():
    """Decoding everything again for every token would take minutes."""
    stream, start = IncrementalDetokenizer(TOKENIZERS["word piece"]), time.process_time()
    assert len("".join(stream.append([1]) for _ in range(10_000))) == 59_999
    assert time.process_time() - start < 10


def window_tokenizer(decoder: decoders.Decoder | None) -> Tokenizer:
    """A tokenizer that is decoded by windows, with a token of U+FFFD and one of no text."""
    words = ["a", "\ufffd", "", "##b", "b</w>", "<pad>", "[UNK]"]
    library = Library(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    if decoder is not None:
        library.decoder = decoder
    tokenizer = Tokenizer(library)
    assert tokenizer.bytes_of_tokens is None
    return tokenizer


WINDOWS = {
    "WordPiece": window_tokenizer(decoders.WordPiece()),
    "CTC": window_tokenizer(decoders.CTC(cleanup=False)),
    "BPE": window_tokenizer(decoders.BPEDecoder("</w>")),
    "none": window_tokenizer(None),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("token", [1, 2, 5])
def test_a_window_does_not_grow_with_text_that_may_be_incomplete(name, token, monkeypatch):
    """U+FFFD after U+FFFD, or tokens without text: each token is decoded a constant number of times, and shown soon."""
    tokenizer, num_decoded, decode = WINDOWS[name], 0, Tokenizer.decode

    def counted(self: Tokenizer, ids: list[int], **options: bool) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return decode(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    stream = IncrementalDetokenizer(tokenizer, [0])
    shown = "".join(stream.append([token]) for _ in range(1000))
    assert num_decoded < 100 * 1000
    text = decode(tokenizer, [0] + [token] * 1000).removeprefix(decode(tokenizer, [0]))
    assert text.startswith(shown) and len(shown) >= len(text) - 2 * 8
    assert shown + stream.finish() == text


@pytest.mark.parametrize("name", WINDOWS)
@given(ids=st.lists(st.sampled_from([0, 1, 1, 1, 1, 2, 3, 4, 5]), max_size=60), cuts=CUTS)
def test_a_window_shows_every_replacement_character(name, ids, cuts):
    text = "".join(pieces_of(WINDOWS[name], ids, cuts, skip_special_tokens=False))
    if name != "CTC":  # a collapse looks at all repetitions before a token
        assert text == WINDOWS[name].decode(ids, skip_special_tokens=False)
    assert text.count("\ufffd") == WINDOWS[name].decode(ids, skip_special_tokens=False).count("\ufffd")


@given(data=st.data(), cuts=CUTS)
def test_a_window_never_cuts_a_character_among_replacement_characters(data, cuts):
    library = byte_level(words=())
    library.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("~", 0, 0)])
    bad, good = library.encode("\u00ff").ids[1:], library.encode("é日😀").ids
    parts = data.draw(st.lists(st.sampled_from([bad, bad, bad, good, good[:1], good[2:4], good[5:8]]), max_size=24))
    ids = [token for part in parts for token in part]
    assert "".join(pieces_of(Tokenizer(library), ids, cuts)) == library.decode(ids)
