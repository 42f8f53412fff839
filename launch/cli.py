"""What every launcher shares: flags, the compilation cache, and how errors reach the user."""

import contextlib
import os
import pathlib
import re
import sys
from collections.abc import Callable

from absl import flags

HOUSE_ERROR = re.compile(r".+: got .*, need .*", re.DOTALL)  # trace_jax.checks.message


def run(main: Callable[[], None], doc: str) -> None:
    """Parses the flags, runs `main` and exits.

    The user's own errors are a line for each problem and code 2; Ctrl-C is 130; anything else keeps
    its traceback.
    """
    flags.DEFINE_bool("help", False, "show this help", short_name="h")
    try:
        rest = flags.FLAGS(sys.argv)[1:]
        if rest:
            raise flags.Error(f"got {rest}, need --name=value flags only; see --help")
    except flags.Error as error:
        sys.exit(_complain(error))
    if flags.FLAGS.help:
        print(doc.strip(), flags.FLAGS.main_module_help(), sep="\n\n")
        sys.exit(0)
    sys.path.insert(0, os.getcwd())  # where a user's own reward module is
    cache = pathlib.Path.home() / ".cache" / "trace_jax"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    try:
        main()
    except KeyboardInterrupt:
        # The loop has saved what there was to save, and on its way here the interrupt has closed
        # run directory, reward processes and checkpoints: they are context managers. XLA may still
        # be computing; tearing the interpreter down under it crashes, so nothing is torn down.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(130)
    except (ValueError, OSError, RuntimeError) as error:  # ours to explain, if in the house form
        if HOUSE_ERROR.fullmatch(str(error)):
            sys.exit(_complain(error))
        if isinstance(error, OSError) and error.filename is not None:
            need = "a path that can be read and written here"
            got = error.strerror or type(error).__name__
            sys.exit(_complain(f"{error.filename}: got {got}, need {need}."))
        raise


def integers(flag: str, values: list[str]) -> list[int]:
    """Whole numbers >= 0 of a comma-separated flag."""
    if not values or not all(value.strip().isdecimal() for value in values):
        raise ValueError(f"{flag}: got {','.join(values)}, need whole numbers such as 0,1,2.")
    return [int(value) for value in values]


def _complain(error: Exception | str) -> int:
    problems = str(error).splitlines()
    house = len(problems) > 1 and all(HOUSE_ERROR.fullmatch(line) for line in problems)
    print(f"error:\n{error}" if house else f"error: {error}", file=sys.stderr)
    return 2
