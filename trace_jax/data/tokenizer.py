"""Text to token ids and back: a Hugging Face tokenizer plus a chat template, one path for all.

The byte-level tokenizer of the demo and the tokenizer of a real checkpoint differ only in their
files. Text is data: no prompt can contain an added token (`<|im_end|>`, `<think>`, ...) that the
chat template did not put there, because literals in the text are encoded as plain text.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.sandbox
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from trace_jax.checks import message, require

# Short on purpose, so that the prompts of a million-parameter model stay short. A conversation with
# its answer extends the prompt: `<|im_start|>question<|im_start|>` + `answer<|im_end|>`.
BYTE_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A Hugging Face tokenizer with its chat template and the ids that end an answer."""

    hf: HfTokenizer
    template: str  # jinja2 source, rendered in a sandbox
    special: Mapping[str, str]  # bos_token, eos_token, ... that the template may name
    pad_id: int
    stop_ids: tuple[int, ...]  # sampling any of these ends the answer
    vocab_size: int  # one more than the largest id

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as data: a literal such as `<|im_end|>` becomes plain pieces."""
        ids = self._raw_ids(text)
        added = self._added()
        if added.isdisjoint(ids):
            return ids
        ids = []
        for piece in _break_literals(text, self._literals()):
            ids.extend(self._raw_ids(piece))
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of `ids`. Never raises: broken UTF-8 and unknown ids become U+FFFD.

        Args: special: True spells out special tokens, False leaves them out. Added tokens that are
              not special (`<think>`) always stay, because the reward looks for them.
        """
        pieces = []
        for is_known, run in itertools.groupby((int(i) for i in ids), key=self._is_known):
            known = list(run)
            if is_known:
                pieces.append(self.hf.decode(known, skip_special_tokens=not special))
            else:
                pieces.append("\ufffd" * len(known))
        return "".join(pieces)

    def response_text(self, ids: Sequence[int]) -> str:
        """What the reward reads: the response without its final stop token, nothing else hidden.

        Other special tokens are spelled out. If they vanished, an answer with markers strewn in
        would be rewarded like a clean one.
        """
        answer = [int(i) for i in ids]
        if answer and answer[-1] in self.stop_ids:
            answer.pop()
        return self.decode(answer, special=True)

    def prompt_ids(self, user_text: str, system: str | None = None) -> list[int]:
        """Ids of one question after the chat template, ready for the answer.

        Equals the encoding of the rendered template (what other frameworks feed the model) unless
        the texts contain literals of added tokens; those alone are encoded apart, as plain text.
        Raises: ValueError if the tokenizer maps the text onto an added token in a way that cannot
                be broken (a normaliser that rewrites look-alikes).
        """
        texts = {"user": user_text} if system is None else {"system": system, "user": user_text}
        literals = self._literals()
        mark = next((c for c in _MARKS if not any(c in text for text in texts.values())), "")
        assert mark, "a text that holds all 32 noncharacters"
        messages = []
        for role, text in texts.items():
            require(
                self._added().isdisjoint(self.encode(text)),
                "tokenizer.prompt_ids",
                f"a {role} text that normalises to a special token: {text[:80]!r}",
                "text without one",
            )
            marked = mark.join(_break_literals(text, literals))
            messages.append({"role": role, "content": marked})
        rendered = self._render(messages)
        ids: list[int] = []
        for piece in rendered.split(mark):
            ids.extend(self._raw_ids(piece))
        return ids

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes the files that `load_tokenizer` (and Hugging Face) read."""
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.hf.save(str(directory / "tokenizer.json"))
        config = dict(self.special) | {
            "chat_template": self.template,
            "pad_token": self.hf.id_to_token(self.pad_id),
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        generation = {"eos_token_id": list(self.stop_ids), "pad_token_id": self.pad_id}
        _write_json(directory / "tokenizer_config.json", config)
        _write_json(directory / "generation_config.json", generation)

    def _render(self, messages: list[dict[str, str]]) -> str:
        template = _compiled(self.template)
        return template.render(messages=messages, add_generation_prompt=True, **self.special)

    def _raw_ids(self, text: str) -> list[int]:
        return self.hf.encode(text, add_special_tokens=False).ids

    def _is_known(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and self.hf.id_to_token(token) is not None

    def _added(self) -> frozenset[int]:
        return frozenset(self.hf.get_added_tokens_decoder())

    def _literals(self) -> tuple[str, ...]:
        return tuple(t.content for t in self.hf.get_added_tokens_decoder().values())


def byte_tokenizer() -> Tokenizer:
    """The byte-level tokenizer of the demo: 256 bytes and 5 markers, built in memory."""
    byte_of = {char: byte for byte, char in enumerate(_byte_chars())}
    hf = HfTokenizer(models.BPE(vocab=byte_of, merges=[]))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])  # 256, 257, 258
    # Not special, as in Qwen3: decoding keeps them and the reward can find the end of thinking.
    hf.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])  # 259, 260
    return Tokenizer(
        hf=hf,
        template=BYTE_TEMPLATE,
        special={"eos_token": "<|im_end|>"},
        pad_id=256,
        stop_ids=(258,),
        vocab_size=261,
    )


def load_tokenizer(spec: str) -> Tokenizer:
    """Loads "byte" or a directory in Hugging Face layout.

    Args:    spec: "byte", or a directory with `tokenizer.json`, `tokenizer_config.json`, a chat
             template (`chat_template.jinja`, else in the config) and `generation_config.json`,
             whose `eos_token_id` are the stop ids (without that file: the config's eos_token).
    Raises:  ValueError naming the file and what is missing from it.
    """
    if spec == "byte":
        return byte_tokenizer()
    directory = pathlib.Path(spec)
    where = "config.data.tokenizer"
    require(directory.is_dir(), where, repr(spec), '"byte" or an existing directory')
    path = directory / "tokenizer.json"
    require(path.is_file(), where, f"no {path.name} in {spec}", "the file of a fast tokenizer")
    try:
        hf = HfTokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception on a malformed file
        raise ValueError(message(str(path), error, "a Hugging Face tokenizer.json")) from error
    hf.no_padding()
    hf.no_truncation()
    config = _read_json(directory / "tokenizer_config.json")
    generation = _read_json(directory / "generation_config.json")
    special = {k: _content(v) for k, v in config.items() if k.endswith("_token") and _content(v)}
    stop_ids = _stop_ids(hf, generation, special, spec)
    pad = hf.token_to_id(special["pad_token"]) if "pad_token" in special else None
    return Tokenizer(
        hf=hf,
        template=_chat_template(directory, config),
        special=special,
        pad_id=stop_ids[0] if pad is None else pad,  # padding is masked, so any id will do
        stop_ids=stop_ids,
        vocab_size=max(hf.get_vocab(with_added_tokens=True).values()) + 1,
    )


def _stop_ids(
    hf: HfTokenizer, generation: Mapping[str, object], special: Mapping[str, str], spec: str
) -> tuple[int, ...]:
    """The checkpoint's own end-of-answer ids; one eos_token is often not all of them."""
    ids = generation.get("eos_token_id")
    if ids is None and "eos_token" in special:
        ids = hf.token_to_id(special["eos_token"])
    ids = [ids] if isinstance(ids, int) else ids
    require(
        isinstance(ids, list) and len(ids) > 0 and all(type(i) is int for i in ids),
        f"{spec}/generation_config.json",
        f"eos_token_id {ids}",
        "one id or a list of ids",
        'add {"eos_token_id": [...]} or an eos_token in tokenizer_config.json',
    )
    assert isinstance(ids, list)
    return tuple(ids)


def _chat_template(directory: pathlib.Path, config: Mapping[str, object]) -> str:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = {t["name"]: t["template"] for t in template}.get("default")
    require(
        isinstance(template, str),
        f"{directory}/tokenizer_config.json",
        "no chat_template",
        "one, or a file chat_template.jinja beside it",
        "a base model has none: write a template such as '{{ messages[-1].content }}'",
    )
    return str(template)


# Noncharacters: never in valid text files, and no tokenizer knows them. They mark where a literal
# is broken while the template is rendered.
_MARKS = tuple(chr(c) for c in range(0xFDD0, 0xFDF0))


def _break_literals(text: str, literals: Sequence[str]) -> list[str]:
    """Cuts `text` inside every literal, after its first character, so that none survives whole."""
    if not any(literal in text for literal in literals):
        return [text]
    longest_first = sorted((x for x in literals if x), key=len, reverse=True)
    # A lookahead finds overlapping literals too; a one-character literal cannot be cut.
    pattern = re.compile("(?=" + "|".join(map(re.escape, longest_first)) + ")")
    cuts = [found.start() + 1 for found in pattern.finditer(text)]
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    """Compiled as Hugging Face compiles chat templates; a template is not trusted code."""

    def raise_exception(text: str) -> None:
        raise jinja2.exceptions.TemplateError(text)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, **kw: json.dumps(x, ensure_ascii=False, **kw)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template)


def _byte_chars() -> list[str]:
    """The printable stand-in of each byte in GPT-2's byte-level vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(b if b in printable else next(spare)) for b in range(256)]


def _content(token: object) -> str:
    """A token in a config is a string or an object with its content."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else ""


def _read_json(path: pathlib.Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # malformed JSON or UTF-8
        raise ValueError(message(str(path), error, "a JSON object")) from error
    require(isinstance(loaded, dict), str(path), type(loaded).__name__, "a JSON object")
    return loaded


def _write_json(path: pathlib.Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
