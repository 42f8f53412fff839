"""The byte-level BPE tokenizer that a GGUF file holds, as Hugging Face's files.

GGUF names a splitting rule (`tokenizer.ggml.pre`) instead of writing it down; the rules known here
are "gpt-2" and "smollm" (every digit alone, then GPT-2's splitting).
Source: llama.cpp's src/llama-vocab.cpp for the rules.
"""

import dataclasses
import pathlib
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trace_jax.checks import message, require
from trace_jax.hf import directory as folder
from trace_jax.hf.gguf_metadata import Metadata

# values of tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
    """What is written beside the weights."""

    tokenizer: Tokenizer
    template: str | None
    special: dict[str, str]  # eos_token, ... of tokenizer_config.json
    ids: dict[str, int]  # eos_token_id, ... of generation_config.json

    def save(self, directory: pathlib.Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json, generation_config.json and the template."""
        self.tokenizer.save(str(directory / "tokenizer.json"))
        config = {
            **self.special,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        if self.template is not None:
            config["chat_template"] = self.template
            path = directory / "chat_template.jinja"
            path.write_text(self.template, encoding="utf-8", newline="")
        for name, content in (("tokenizer", config), ("generation", self.ids)):
            folder.write_json(directory / f"{name}_config.json", content)


def build(metadata: Metadata, vocab: int) -> Files:
    """The tokenizer of a GGUF file with `vocab` tokens.

    Raises: ValueError for another kind of tokenizer, an unknown splitting rule, ids out of range,
            or merges and types that do not fit the tokens.
    """
    where = f"{metadata.file}: tokenizer.ggml"
    kind = metadata.get("tokenizer.ggml.model", str)
    require(kind == "gpt2", f"{where}.model", repr(kind), "'gpt2': byte-level BPE")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", bool, False)
    require(not adds_bos, f"{where}.add_bos_token", adds_bos, "False: the template writes it")
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    require(len(set(tokens)) == vocab, f"{where}.tokens", "repeated tokens", "distinct ones")
    types = metadata.get("tokenizer.ggml.token_type", list)
    require(len(types) == vocab, f"{where}.token_type", f"{len(types)} types", f"{vocab}")
    tokenizer = _bpe(tokens, metadata.get("tokenizer.ggml.merges", list), where)
    tokenizer.pre_tokenizer = _splitter(metadata.get("tokenizer.ggml.pre", str), where)
    tokenizer.decoder = decoders.ByteLevel()
    for token, type_ in zip(tokens, types, strict=True):
        if type_ in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif type_ == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    special, ids = {}, {}
    for gguf_name, name in (
        ("bos", "bos"),
        ("eos", "eos"),
        ("unknown", "unk"),
        ("padding", "pad"),
    ):
        key = f"tokenizer.ggml.{gguf_name}_token_id"
        i = metadata.get(key, int, None)
        require(i is None or 0 <= i < vocab, f"{metadata.file}: {key}", i, f"an id below {vocab}")
        if i is not None:
            special[f"{name}_token"] = tokens[i]
            ids[f"{name}_token_id"] = i
    require("eos_token_id" in ids, f"{where}.eos_token_id", "missing", "the id that ends an answer")
    ids.pop("unk_token_id", None)  # no field of generation_config.json
    template = metadata.get("tokenizer.chat_template", str, None)
    return Files(tokenizer=tokenizer, template=template, special=special, ids=ids)


def _bpe(tokens: list[str], merges: list[str], where: str) -> Tokenizer:
    odd = next((merge for merge in merges if merge.count(" ") != 1), None)
    require(odd is None, f"{where}.merges", repr(odd), "two pieces with a space between")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs)
    except Exception as error:  # tokenizers raises bare Exception: a piece that is no token
        raise ValueError(message(f"{where}.merges", error, "merges of tokens")) from error
    return Tokenizer(model)


def _splitter(rule: str, where: str) -> Any:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == "gpt-2":
        return gpt2
    known = "one of ['gpt-2', 'smollm']"
    require(rule == "smollm", f"{where}.pre", repr(rule), known)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
