"""Oracle: Python's incremental UTF-8 decoder for bytes, and the decoding of all ids at once."""

import codecs
import random

import pytest
from tokenizers import Tokenizer, decoders, models

from trace_jax.data.text_stream import TextStream
from trace_jax.data.tokenizer import Tokenizer as OurTokenizer
from trace_jax.data.tokenizer import byte_tokenizer

TEXTS = ["hello", "naïve — 漢字", "👩‍👩‍👧 \U0010ffff!", "a\n\n b", "é" * 40]


def pieces_of(tokenizer, ids, **args):
    stream = TextStream(tokenizer, **args)
    return [*(stream.push(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole_and_as_soon_as_they_are_complete(text):
    decoder = codecs.getincrementaldecoder("utf-8")()
    expected = [decoder.decode(bytes([b])) for b in text.encode()]
    pieces = pieces_of(byte_tokenizer(), list(text.encode()))
    assert pieces == [*expected, ""]
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_join_to_the_text_of_all_ids(seed):
    tokenizer, rng = byte_tokenizer(), random.Random(seed)
    some = [*range(32, 127), *range(128, 256), *range(256, 263)]  # also broken and unknown ids
    ids = [rng.choice(some) for _ in range(200)] + list("漢".encode()[: seed % 4])
    for special in (True, False):
        pieces = pieces_of(tokenizer, ids, special=special)
        assert "".join(pieces) == tokenizer.decode(ids, special=special)


def test_an_unfinished_character_shows_at_the_end_only():
    pieces = pieces_of(byte_tokenizer(), [65, *"漢".encode()[:2]])
    assert pieces == ["A", "", "", "\ufffd"]


def test_broken_bytes_show_at_the_next_character():
    assert pieces_of(byte_tokenizer(), [0xFF, 0xFF, 66]) == ["", "", "\ufffd\ufffdB", ""]


def metaspace_tokenizer():
    """Words with a leading blank that decoding drops at the start, and bytes for the rest."""
    words = ["▁the", "▁cat", "s", "<0xE6>", "<0xBC>", "<0xA2>"]
    vocab = {word: i for i, word in enumerate(words)}
    hf = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    hf.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return OurTokenizer(hf=hf, template="", special={}, pad_id=0, stop_ids=(2,), vocab_size=6)


def test_blanks_between_words_survive_where_decoding_strips_the_first():
    ids = [0, 1, 2, 1, 3, 4, 5, 0]
    pieces = pieces_of(metaspace_tokenizer(), ids)
    assert pieces == ["the", " cat", "s", " cat", "", "", "漢", " the", ""]
    assert "".join(pieces) == metaspace_tokenizer().decode(ids)


@pytest.mark.parametrize("byte", [0x80, 0xFF, 0xF0])
def test_bytes_that_never_complete_a_character_cost_the_same_each(byte, monkeypatch):
    tokenizer, decoded = byte_tokenizer(), []
    decode = OurTokenizer.decode
    monkeypatch.setattr(
        OurTokenizer,
        "decode",
        lambda s, ids, **a: (decoded.append(len(ids)), decode(s, ids, **a))[1],
    )
    ids = [65, *[byte] * 300, *"漢".encode(), 66]
    pieces = pieces_of(tokenizer, ids, special=True)
    assert max(decoded) < 40
    assert "".join(pieces) == decode(tokenizer, ids, special=True)
