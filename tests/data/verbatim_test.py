"""Sampled ids reach the trainer as they were sampled, from the engine to the batch."""

import dataclasses
import json

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trace_jax import overrides, stages
from trace_jax.reward.pool import RewardPool


def merging_tokenizer(folder):
    """Every two letters a-h are also one token, so that sampled text has many spellings."""
    letters = "abcdefgh"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {char: i for i, char in enumerate(alphabet, 1)}
    merges = [(a, b) for a in letters for b in letters]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    hf = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(["<eos>"])
    folder.mkdir()
    hf.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<eos>", "chat_template": "{{ messages[-1].content }}="}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_ids_that_would_be_merged_reach_the_batch_as_they_were_sampled(tmp_path):
    config = overrides.load("tiny_cpu")
    data = dataclasses.replace(config.data, tokenizer=merging_tokenizer(tmp_path / "t"))
    built = stages.build(dataclasses.replace(config, data=data))
    sampled = {}

    def recorder(weights, prompts, samples, key):
        found = built.generate(weights, prompts, samples, key)
        sampled.update({(t.prompt.uid, t.sample): t.tokens_T.copy() for t in found})
        return found

    recorded = dataclasses.replace(built, generate=recorder)
    params = stages.initial_params(built)
    # only letters: a vocabulary in which nearly every answer has another canonical spelling
    letters = [built.tokenizer.hf.token_to_id(c) for c in "abcdefgh"]
    embed = np.zeros_like(np.asarray(params["embed"]))
    embed[letters] = np.asarray(params["embed"])[letters]
    params["embed"] = jax.numpy.asarray(embed * 30)
    prompts = built.prompts.train[: config.data.prompts_per_step]
    with RewardPool("exact") as pool:
        batch = stages.roll_out(recorded, built.sync(params, 0), prompts, pool, 0, 0).batch
    rows = [
        tuple(np.asarray(row)[np.asarray(valid)].tolist())
        for row, valid in zip(batch.tokens_BT, batch.valid_BT, strict=True)
    ]
    expected = [tuple(int(i) for i in tokens) for tokens in sampled.values()]
    assert len(expected) == len(prompts) * config.rollout.group_size
    assert sorted(r for r in rows if r) == sorted(expected)
    other = 0
    for (uid, _), tokens in sampled.items():
        length = next(len(p.tokens) for p in prompts if p.uid == uid)
        answer = [int(i) for i in tokens[length:] if i not in built.tokenizer.stop_ids]
        other += built.tokenizer.encode(built.tokenizer.decode(answer)) != answer
    assert other > len(expected) / 4  # the test would notice a second tokenisation
