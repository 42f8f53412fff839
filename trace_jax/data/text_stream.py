"""Sampled ids -> text piece by piece, so that joined pieces are the text of all ids together."""

from trace_jax.data.tokenizer import Tokenizer

_WAITING = 8  # ids after which broken bytes are given up; a character is at most 4 bytes
_BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character (yet)


class TextStream:
    """Decodes one answer while it is sampled.

    A character whose bytes are spread over tokens comes when it is complete; bytes that never
    become one come as U+FFFD at the next whole character or at the end. Only the ids since the last
    two pieces are decoded again, so the cost of a token does not grow with the answer.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = True):
        self._tokenizer, self._special = tokenizer, special
        self._before: list[int] = []  # ids of the last piece: decoders may look one token back
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; "" while a character is incomplete."""
        self._waiting.append(token)
        text = self._new_text()
        if not text or text.endswith(_BROKEN):
            return "" if len(self._waiting) <= 2 * _WAITING else self._give_up()
        self._before, self._waiting = self._waiting, []
        return text

    def _give_up(self) -> str:
        """Broken bytes that no later id can complete, so that waiting costs no more and more."""
        old = self._decode(self._before)
        ids = [*self._before, *self._waiting]
        whole, keep = self._decode(ids), _WAITING
        head = self._decode(ids[:-keep])
        # exact only where decoding splits: the rest alone must give the rest of the text
        if head + self._decode(ids[-keep:]) != whole or not head.startswith(old):
            return ""
        self._before, self._waiting = [], ids[-keep:]
        return head[len(old) :]

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        text = self._new_text()
        self._before, self._waiting = [], []
        return text

    def _new_text(self) -> str:
        old = self._decode(self._before)
        return self._decode([*self._before, *self._waiting])[len(old) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, special=self._special)
