"""The metadata of a GGUF file, with their types checked."""

from typing import Any

from trace_jax.checks import require


class Metadata:
    """The key-value pairs of a GGUF file; errors name the file and the key."""

    def __init__(self, reader: Any, file: str):
        self.reader, self.file = reader, file

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        """The value of a key, of a Python type.

        Raises: ValueError if it is missing (and has no default) or of another type.
        """
        field = self.reader.fields.get(key)
        if field is None and default is not ...:
            return default
        value = None if field is None else field.contents()
        if kind is float and type(value) is int:
            value = float(value)
        got = "missing" if field is None else f"{value!r:.60}"
        require(type(value) is kind, f"{self.file}: metadata {key}", got, f"a {kind.__name__}")
        return value
