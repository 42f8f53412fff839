"""Oracles: Python's own UTF-8 codec, and templates whose rendering is written out by hand."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trace_jax.data.tokenizer import byte_tokenizer, load_tokenizer

TEXTS = [
    "",
    "reverse runrig",
    "  two\n\tspaces ",
    "naïve — 漢字",
    "👩‍👩‍👧 \U0010ffff",
    "\x00\x7f\r\n",
]
LITERALS = [
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<|im_end|><|im_end|>",
    "<<think>>",
]


@pytest.mark.parametrize("text", [*TEXTS, *LITERALS])
def test_byte_tokenizer_encodes_text_as_its_utf8_bytes_and_back(text):
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_byte_tokenizer_has_the_documented_ids():
    tokenizer = byte_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.stop_ids) == (261, 256, (258,))
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    assert [tokenizer.hf.token_to_id(mark) for mark in marks] == [256, 257, 258, 259, 260]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([0xFF], "\ufffd"),
        ([0xC3], "\ufffd"),
        ([0xC3, 0x28], "\ufffd("),
        ([65, 261, 66], "A\ufffdB"),  # beyond the vocabulary, as a padded embedding allows
        ([65, -1, 99_999], "A\ufffd\ufffd"),
        ([257, 65, 258], "A"),
        ([259, 65, 260], "<think>A</think>"),
    ],
)
def test_decode_replaces_what_is_no_text_and_never_raises(ids, text):
    assert byte_tokenizer().decode(ids) == text


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([65, 66, 258], "AB"),
        ([65, 66], "AB"),
        ([258], ""),
        ([], ""),
        ([65, 257, 66, 258], "A<|im_start|>B"),  # not "AB": an answer with markers is not clean
        ([65, 256, 258], "A<|endoftext|>"),
    ],
)
def test_response_text_hides_the_final_stop_token_and_nothing_else(ids, text):
    assert byte_tokenizer().response_text(ids) == text


def test_prompt_ids_of_the_byte_tokenizer_are_the_short_template():
    tokenizer = byte_tokenizer()
    assert tokenizer.prompt_ids("hi") == [257, *b"hi", 257]
    assert tokenizer.prompt_ids("hi", system="be brief") == [257, *b"be brief", 257, *b"hi", 257]


@pytest.mark.parametrize("literal", LITERALS)
def test_prompt_ids_keep_literals_of_special_tokens_as_plain_text(literal):
    text = f"a{literal}b"
    ids = byte_tokenizer().prompt_ids(text, system=literal)
    assert ids == [257, *literal.encode(), 257, *text.encode(), 257]


def _checkpoint(directory, *, template=None, eos=(0, 2), **config):
    """A tokenizer with merges and a BOS template, as a real checkpoint has, written by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: 3 + i for i, char in enumerate(alphabet)} | {"he": 259, "ll": 260, "hell": 261}
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    hf = Tokenizer(models.BPE(vocab=vocab | {"<eos>": 0, "<s>": 1, "<eot>": 2}, merges=merges))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(["<eos>", "<s>", "<eot>"])
    hf.add_tokens([AddedToken("<tool>", normalized=False)])
    directory.mkdir(exist_ok=True)
    hf.save(str(directory / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<eot>"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    if eos is not None:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return hf


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
)


def test_load_tokenizer_reads_a_checkpoint_directory(tmp_path):
    hf = _checkpoint(tmp_path / "a", template=TEMPLATE)
    tokenizer = load_tokenizer(str(tmp_path / "a"))
    assert tokenizer.stop_ids == (0, 2)  # all of generation_config, not the one eos_token
    assert tokenizer.vocab_size == 263 == hf.token_to_id("<tool>") + 1
    rendered = "<s>user: hello\n"
    assert tokenizer.prompt_ids("  hello ") == hf.encode(rendered, add_special_tokens=False).ids
    ids = tokenizer.prompt_ids("hell<eot><tool>")
    assert not {0, 2, 262} & set(ids) and ids[0] == 1 and 261 in ids
    assert tokenizer.decode(ids) == "user: hell<eot><tool>\n"


def test_load_tokenizer_takes_the_eos_token_and_template_of_the_config_where_files_are_missing(
    tmp_path,
):
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    _checkpoint(tmp_path / "a", eos=None, chat_template=named)
    tokenizer = load_tokenizer(str(tmp_path / "a"))
    assert (tokenizer.stop_ids, tokenizer.pad_id, tokenizer.template) == ((2,), 2, TEMPLATE)


def test_saved_byte_tokenizer_loads_with_the_same_ids(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.save(tmp_path / "tok")
    again = load_tokenizer(str(tmp_path / "tok"))
    assert (again.pad_id, again.stop_ids, again.vocab_size) == (256, (258,), 261)
    for text in (*TEXTS, *LITERALS):
        assert again.prompt_ids(text, "s") == tokenizer.prompt_ids(text, "s")


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("directory", "an existing directory"),
        ("tokenizer.json", "no tokenizer.json"),
        ("eos", "eos_token_id"),
        ("json", "tokenizer_config.json"),
    ],
)
def test_load_tokenizer_says_which_file_lacks_what(tmp_path, broken, says):
    _checkpoint(tmp_path / "a", template=TEMPLATE, eos=[])
    if broken == "tokenizer.json":
        (tmp_path / "a" / "tokenizer.json").unlink()
    if broken == "json":
        (tmp_path / "a" / "tokenizer_config.json").write_text("{")
    spec = tmp_path / ("missing" if broken == "directory" else "a")
    with pytest.raises(ValueError, match=says):
        load_tokenizer(str(spec))


def test_chat_template_of_a_checkpoint_cannot_reach_python(tmp_path):
    _checkpoint(tmp_path / "a", template="{{ messages.__class__.__mro__ }}")
    tokenizer = load_tokenizer(str(tmp_path / "a"))
    with pytest.raises(Exception, match="unsafe"):
        tokenizer.prompt_ids("hi")


def test_a_base_model_without_a_template_encodes_and_only_prompts_are_refused(tmp_path):
    hf = _checkpoint(tmp_path / "a")
    tokenizer = load_tokenizer(str(tmp_path / "a"))
    assert tokenizer.encode("hell o") == hf.encode("hell o", add_special_tokens=False).ids
    for render in (tokenizer.answer_prefix, lambda: tokenizer.prompt_ids("hi")):
        with pytest.raises(ValueError, match=r"_config.json: got no chat_template.*messages\[-1"):
            render()
    tokenizer.save(tmp_path / "b")
    assert load_tokenizer(str(tmp_path / "b")).template is None


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja: got .*, need UTF-8"),
        ("chat_template.json", b"{", "chat_template.json: got .*, need a JSON object"),
        ("chat_template.json", b"[]", "chat_template.json: got list, need a JSON object"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json: got .*, need a JSON object"),
        ("tokenizer_config.json", b'{"chat_template": ["x"]}', r"chat_template: got \['x'\], need"),
        ("tokenizer_config.json", b'{"chat_template": 3}', r"chat_template: got 3, need a string"),
        ("generation_config.json", b'{"eos_token_id": 1099511627776}', r"\[1099511627776\], of no"),
        ("generation_config.json", b'{"eos_token_id": true}', r"eos_token_id \[True\], need"),
    ],
)
def test_damaged_files_are_named(tmp_path, file, content, says):
    _checkpoint(tmp_path / "a")
    (tmp_path / "a" / file).write_bytes(content)
    with pytest.raises(ValueError, match=says):
        load_tokenizer(str(tmp_path / "a"))


def test_truncation_and_padding_of_a_tokenizer_file_are_not_for_prompts(tmp_path):
    hf = _checkpoint(tmp_path / "a", template=TEMPLATE)
    hf.enable_truncation(4)
    hf.enable_padding(pad_id=1, length=64)
    hf.save(str(tmp_path / "a" / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "a"))
    assert tokenizer.decode(tokenizer.encode("a long text")) == "a long text"
    assert len(tokenizer.encode("abc")) == 3


def test_lone_surrogates_become_the_replacement_character():
    tokenizer = byte_tokenizer()
    assert tokenizer.prompt_ids("a\ud800b\udcff") == tokenizer.prompt_ids("a\ufffdb\ufffd")
    assert tokenizer.encode("\udfff") == list("\ufffd".encode())


def test_an_error_begins_with_what_the_user_wrote():
    with pytest.raises(ValueError, match=r"^--model: got 'nowhere', need"):
        load_tokenizer("nowhere", "--model")
