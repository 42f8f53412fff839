"""The one form of error message: where, what it got, what it needs, how to fix it."""


def message(where: str, got: object, need: object, fix: str | None = None) -> str:
    """Formats an error as `where: got X, need Y. Fix: Z` so that every error reads the same."""
    text = f"{where}: got {got}, need {need}."
    return text if fix is None else f"{text} Fix: {fix}"


def require(
    condition: bool,
    where: str,
    got: object,
    need: object,
    fix: str | None = None,
    error: type[Exception] = ValueError,
) -> None:
    """Raises `error` in the house form unless `condition` holds.

    For facts known before anything runs (config, shapes, dtypes, files). Facts about array values
    at run time go to metrics instead.
    """
    if not condition:
        raise error(message(where, got, need, fix))
