"""Shows what a model is made of and what it costs, from its files or from its name alone.

    python launch/inspect.py --model=checkpoints/mine          a directory: checkpoint, export, run
    python launch/inspect.py --model=Qwen3.5-35B-A3B           a known model, no files needed
    python launch/inspect.py --model=Qwen3-30B-A3B --set quant.acts=none --set quant.guide=mantissa

Prints layers by kind, parameters (total and active), sizes on disk and in memory, FP4 memory and
guidance bytes per token under the quant section, the tokenizer, and what training would quantise.
Nothing is allocated: a model of any size can be looked at.
"""

import importlib.machinery
import importlib.util
import os
import sys

if __name__ == "inspect":
    # `python launch/train.py` puts this folder first on the path, so that this file hides the
    # module of the standard library that has its name: hand over to that one.
    _here = os.path.dirname(os.path.abspath(__file__))
    _others = [path for path in sys.path if os.path.abspath(path or ".") != _here]
    _spec = importlib.machinery.PathFinder.find_spec("inspect", _others)
    assert _spec is not None and _spec.loader is not None  # every Python has it
    sys.modules["inspect"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["inspect"])
else:
    from absl import flags

    from launch import cli

    _MODEL = flags.DEFINE_string("model", None, "a directory, or the name of a known model")
    _SET = flags.DEFINE_multi_string("set", [], "quant.field=value; may be repeated")
    _JSON = flags.DEFINE_bool("json", False, "print one JSON object instead")


def main() -> None:
    if _MODEL.value is None:
        raise ValueError("--model: got nothing, need a directory or the name of a known model.")

    from trace_jax import config as cfg
    from trace_jax import inspection, inspection_text, overrides, sources
    from trace_jax.models import known

    name, source = _MODEL.value, None
    if name in known.FIELDS and not os.path.exists(name):
        model = known.get(name)
    else:
        if not os.path.isdir(name):
            choices = f"a directory, or one of {', '.join(known.FIELDS)}"
            raise FileNotFoundError(f"--model: got {name}, no directory, need {choices}.")
        source = sources.find(name, "--model")
        model = source.model
    others = [text for text in _SET.value if not text.startswith("quant.")]
    if others:
        raise ValueError(f"--set: got {others[0]}, need quant.field=value: the model is given.")
    quant = cfg.Quant(mlps="experts" if model.experts else "all")
    config = cfg.Config(name="inspect", model=model, quant=quant)
    config = overrides.override(config, _SET.value)
    found = inspection.inspect(name, config.model, config.quant, source)
    print(found.to_json() if _JSON.value else inspection_text.text(found))


if __name__ == "__main__":
    cli.run(main, __doc__ or "")
