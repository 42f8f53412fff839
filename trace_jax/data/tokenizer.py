"""Text to token ids and back: a Hugging Face tokenizer plus a chat template, one path for all.

The byte-level tokenizer of the demo and the tokenizer of a real checkpoint differ only in their
files. Text is data: no prompt can contain an added token (`<|im_end|>`, `<think>`, ...) that the
chat template did not put there, because literals in the text are encoded as plain text.
"""

import dataclasses
import itertools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from trace_jax.checks import message, require
from trace_jax.data import chat

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
    template: str | None  # jinja2 source, rendered in a sandbox; base models have none
    special: Mapping[str, str]  # bos_token, eos_token, ... that the template may name
    pad_id: int
    stop_ids: tuple[int, ...]  # sampling any of these ends the answer
    vocab_size: int  # one more than the largest id
    where: str = "tokenizer"  # what it was loaded from, to begin an error with

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as data: a literal such as `<|im_end|>` becomes plain pieces."""
        ids = self._raw_ids(text)
        added = self._added()
        if added.isdisjoint(ids):
            return ids
        ids = []
        for piece in chat.break_literals(text, self._literals()):
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

    def prompt_ids(
        self, user_text: str, system: str | None = None, *, thinking: bool | None = None
    ) -> list[int]:
        """Ids of one question after the chat template, ready for the answer; see `chat_ids`."""
        question = {"role": "user", "content": user_text}
        first = [] if system is None else [{"role": "system", "content": system}]
        return self.chat_ids([*first, question], thinking=thinking)

    def chat_ids(
        self, messages: Sequence[Mapping[str, str]], *, thinking: bool | None = None
    ) -> list[int]:
        """Ids of a conversation after the chat template, ready for the next answer.

        Equals the encoding of the rendered template (what other frameworks feed the model) unless
        texts contain literals of added tokens; those alone are encoded apart, as plain text. In
        earlier answers only special tokens are literals: `<think>` and its like are the model's own
        markup, which templates look for (most drop the thinking of earlier answers).

        Args:   messages: {"role": "system" | "user" | "assistant", "content": text}, in order.
                thinking: on or off, if the template has a switch; None: its default.
        Raises: ValueError for another role, a switch that the template does not have, or a text
                that the tokenizer maps onto an added token in a way that cannot be broken (a
                normaliser that rewrites look-alikes), or without a template.
        """
        template = chat.require_template(self.template, self.where)
        mark = chat.free_mark([template, *(m["content"] for m in messages)])
        marked = []
        for m in messages:
            role, text = m["role"], _valid(m["content"])
            need = f"one of {chat.ROLES}"
            require(role in chat.ROLES, "tokenizer.chat_ids: role", repr(role), need)
            literals = self._literals(special_only=role == "assistant")
            pieces = chat.break_literals(text, literals)
            if role != "assistant":
                self._require_plain(text, role)
            marked.append({"role": role, "content": mark.join(pieces)})
        rendered = chat.render(template, marked, self.special, thinking=thinking)
        ids: list[int] = []
        for piece in rendered.split(mark):
            ids.extend(self._raw_ids(piece))
        return ids

    def answer_prefix(self, *, thinking: bool | None = None) -> list[int]:
        """The ids at the end of every prompt that make the model answer; [] if there are none."""
        question = [{"role": "user", "content": "?"}]
        template = chat.require_template(self.template, self.where)
        args = (template, question, self.special)
        whole = chat.render(*args, thinking=thinking)
        bare = chat.render(*args, thinking=thinking, generation_prompt=False)
        return self._raw_ids(whole.removeprefix(bare)) if whole.startswith(bare) else []

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes the files that `load_tokenizer` (and Hugging Face) read."""
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.hf.save(str(directory / "tokenizer.json"))
        template = {} if self.template is None else {"chat_template": self.template}
        config = dict(self.special) | template
        config |= {
            "pad_token": self.hf.id_to_token(self.pad_id),
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        generation = {"eos_token_id": list(self.stop_ids), "pad_token_id": self.pad_id}
        _write_json(directory / "tokenizer_config.json", config)
        _write_json(directory / "generation_config.json", generation)

    def _require_plain(self, text: str, role: str) -> None:
        require(
            self._added().isdisjoint(self.encode(text)),
            "tokenizer.prompt_ids",
            f"a {role} text that normalises to a special token: {text[:80]!r}",
            "text without one",
        )

    def _raw_ids(self, text: str) -> list[int]:
        return self.hf.encode(_valid(text), add_special_tokens=False).ids

    def _is_known(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and self.hf.id_to_token(token) is not None

    def _added(self) -> frozenset[int]:
        return frozenset(self.hf.get_added_tokens_decoder())

    def _literals(self, special_only: bool = False) -> tuple[str, ...]:
        added = self.hf.get_added_tokens_decoder().values()
        return tuple(t.content for t in added if t.special or not special_only)


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


def load_tokenizer(spec: str, where: str = "config.data.tokenizer") -> Tokenizer:
    """Loads "byte" or a directory in Hugging Face layout.

    Args:    spec: "byte", or a directory with `tokenizer.json`, `tokenizer_config.json`, a chat
             template (`chat_template.jinja`, else in the config) and `generation_config.json`.
             Without a template it encodes and decodes; rendering a conversation raises.
             Stop ids are the union of its `eos_token_id`, the config's eos_token, and the special
             token with which the template ends an answer: checkpoints of base models say
             `<|endoftext|>` in one file and end turns with `<|im_end|>` in another.
    Raises:  ValueError naming the file and what is missing from it.
    """
    if spec == "byte":
        return byte_tokenizer()
    directory = pathlib.Path(spec)
    require(directory.is_dir(), where, repr(spec), '"byte" or an existing directory')
    path = directory / "tokenizer.json"
    fix = "transformers writes one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    need = "the file of a fast tokenizer"
    require(path.is_file(), where, f"no {path.name} in {spec}", need, fix)
    try:
        hf = HfTokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception on a malformed file
        raise ValueError(message(str(path), error, "a Hugging Face tokenizer.json")) from error
    hf.no_padding()
    hf.no_truncation()
    config = chat.read_object(directory / "tokenizer_config.json")
    generation = chat.read_object(directory / "generation_config.json")
    special = {k: _content(v) for k, v in config.items() if k.endswith("_token") and _content(v)}
    template = chat.read_template(directory, config)
    stop_ids = _stop_ids(hf, generation, special, template, spec)
    pad = hf.token_to_id(special["pad_token"]) if "pad_token" in special else None
    return Tokenizer(
        hf=hf,
        template=template,
        special=special,
        pad_id=stop_ids[0] if pad is None else pad,  # padding is masked, so any id will do
        stop_ids=stop_ids,
        vocab_size=max(hf.get_vocab(with_added_tokens=True).values()) + 1,
        where=str(directory / "tokenizer_config.json"),
    )


def _stop_ids(
    hf: HfTokenizer,
    generation: Mapping[str, object],
    special: Mapping[str, str],
    template: str | None,
    spec: str,
) -> tuple[int, ...]:
    """Every id with which this checkpoint ends an answer, those of generation_config first."""
    eos = hf.token_to_id(special["eos_token"]) if "eos_token" in special else None
    ids = generation.get("eos_token_id")
    ids = eos if ids is None else ids
    ids = [ids] if isinstance(ids, int) else ids
    fix = 'add {"eos_token_id": [...]} or an eos_token in tokenizer_config.json'
    where, need = f"{spec}/generation_config.json", "one id or a list of ids of the tokenizer"
    good = isinstance(ids, list) and len(ids) > 0 and all(type(i) is int for i in ids)
    require(good, where, f"eos_token_id {ids}", need, fix)
    assert isinstance(ids, list)
    unknown = [i for i in ids if not 0 <= i < 2**32 or hf.id_to_token(i) is None]
    require(not unknown, where, f"eos_token_id {unknown}, of no token", need, fix)
    ids = ids if eos is None else [*ids, eos]
    after = "" if template is None else chat.turn_end(template, special).lstrip()
    for i, token in hf.get_added_tokens_decoder().items():
        if token.special and token.content and after.startswith(token.content):
            ids = [*ids, i]
    return tuple(dict.fromkeys(ids))


def _byte_chars() -> list[str]:
    """The printable stand-in of each byte in GPT-2's byte-level vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(b if b in printable else next(spare)) for b in range(256)]


def _valid(text: str) -> str:
    """Text that UTF-8 can hold: lone surrogates (a broken command line or JSON) become U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def _content(token: object) -> str:
    """A token in a config is a string or an object with its content."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else ""


def _write_json(path: pathlib.Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
