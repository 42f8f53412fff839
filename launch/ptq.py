"""Quantises a checkpoint's expert and MLP weights after training, by several recipes, and compares.

    python launch/ptq.py --model=checkpoints/smollm2
    python launch/ptq.py --model=DIR --text=corpus.txt --calibration_tokens=16384

Calibrates the diagonal Hessian on the start of the text and measures on its end: NVFP4 with the
largest value of a block at 6, Four Over Six, and both with scales searched unweighted and weighted
by the Hessian (H-Scale). Prints a table in Markdown; see docs/ptq.md.
"""

from absl import flags

from launch import cli

_MODEL = flags.DEFINE_string("model", None, "a Hugging Face checkpoint directory")
_TEXT = flags.DEFINE_string("text", None, "a UTF-8 file (default: Python's own manual)")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of the computation")
_CALIBRATION = flags.DEFINE_integer("calibration_tokens", 4096, "tokens", lower_bound=1)
_EVALUATION = flags.DEFINE_integer("evaluation_tokens", 4096, "tokens", lower_bound=2)
_CONTEXT = flags.DEFINE_integer("context", 256, "tokens a sequence", lower_bound=2)
_ROWS = flags.DEFINE_integer("rows", 4, "sequences a batch", lower_bound=1)
_KEEP_FIRST = flags.DEFINE_integer("keep_first", 0, "layers kept unquantised", lower_bound=0)
_KEEP_LAST = flags.DEFINE_integer("keep_last", 0, "layers kept unquantised", lower_bound=0)


def main() -> None:
    if _MODEL.value is None:
        raise ValueError("--model: got nothing, need a checkpoint directory.")

    from trace_jax import config as cfg
    from trace_jax import sources
    from trace_jax.checks import message
    from trace_jax.data.tokenizer import load_tokenizer
    from trace_jax.ptq import calibration, compare, texts

    text, sizes = texts.load(_TEXT.value), {"context": _CONTEXT.value, "rows": _ROWS.value}
    source = sources.find(_MODEL.value, "--model")
    if source.kind == sources.RUN:
        fix = f"python launch/convert.py --src={_MODEL.value} --dst=DIR, then --model=DIR"
        raise ValueError(message("--model", "a run directory", "a checkpoint", fix))
    tokenizer = load_tokenizer(source.tokenizer, "--model")
    sources.require_tokenizer_fits(tokenizer.vocab_size, source.model, _MODEL.value)
    model, params = sources.load(source, dtype=_DTYPE.value)
    half = len(text) // 2  # calibration and evaluation never overlap
    first = texts.batches(tokenizer, text[:half], tokens=_CALIBRATION.value, **sizes)
    second = texts.batches(tokenizer, text[half:], tokens=_EVALUATION.value, **sizes)
    quant = cfg.Quant(mlps="all", keep_first=_KEEP_FIRST.value, keep_last=_KEEP_LAST.value)
    hessian = calibration.calibrate(model, params, first)
    if hessian.unseen_experts:
        print(f"{hessian.unseen_experts} experts saw no calibration token: their layer's mean\n")
    print(compare.table(compare.compare(model, quant, params, hessian, second)))


if __name__ == "__main__":
    cli.run(main, __doc__ or "")
