"""Token ids to text, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from jkv.text.tokenizer import REPLACEMENT, Tokenizer

# A UTF-8 character has at most four bytes, and so comes from at most four tokens.
_CHARACTER_TOKENS = 4
_MAX_PENDING = 8


class Detokenizer:
    """Text deltas of one sequence: joined, they are what decoding adds to the text of the prompt.

    A character is sent once all its bytes are there; U+FFFD only where the bytes can no longer become one.
    Each push decodes a few tokens, so time is linear in the output.

    Byte-fallback decoders (SentencePiece) turn a whole run of byte tokens into U+FFFD if one byte in it is
    invalid; here characters before the invalid byte have been sent and stay. Nor is a character finished that
    a prompt of token ids cuts in two right after another one in byte tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        """`prompt_tail_ids`: the prompt or its end, for a leading space and an unfinished character."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._has_text = False  # decoders treat the first token of a text differently
        self._pending: list[int] = []  # tokens whose text is not all sent
        self._sent = 0  # characters of the pending tokens' text that are sent, or the prompt's
        self._prompt_marks = 0  # U+FFFD after those, left by a character that the prompt did not finish
        self._continue(prompt_tail_ids)

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is certain now."""
        if self._has_text and not self._pending:
            text = self._tokenizer.text_inside(token_id, skip_special_tokens=self._skip)
            if not text.endswith(REPLACEMENT):
                return text  # most tokens: nothing is held back, before or after
        if not self._tokenizer.has_text(token_id, skip_special_tokens=self._skip):
            return ""
        self._pending.append(token_id)
        text = self._decode(self._pending, inside=self._has_text)
        held = self._held(text)
        delta = self._release(text, len(text) - held)
        if not held and (text or self._has_text):
            self._restart(text)
        elif len(self._pending) > _MAX_PENDING:
            delta += self._shorten(text)
        return delta

    def flush(self) -> str:
        """The rest, once no token follows: an unfinished character is U+FFFD now."""
        text = self._decode(self._pending, inside=self._has_text)
        delta = self._release(text, len(text))
        self._restart(text)
        return delta

    def _continue(self, prompt_ids: Sequence[int]) -> None:
        """Start where the prompt ends: inside a character if its last bytes are an unfinished one."""
        tail: list[int] = []
        for token_id in reversed(prompt_ids):
            if self._tokenizer.has_text(token_id, skip_special_tokens=self._skip):
                tail.insert(0, token_id)
            if len(tail) == _CHARACTER_TOKENS:
                break
        if not self._decode(tail, inside=False):
            self._pending = tail
            return
        self._has_text = True
        ends = [tail[start:] for start in range(len(tail))]
        texts = [self._decode(end, inside=True) for end in ends]
        if not all(map(self._held, texts)):
            return  # the last character is whole; only parts of it look unfinished
        for end, text in zip(ends, texts, strict=True):
            held = self._held(text)
            if REPLACEMENT not in text[:-held]:
                self._pending, self._sent, self._prompt_marks = end, len(text) - held, held
                return

    def _decode(self, ids: list[int], *, inside: bool) -> str:
        """The text of `ids` inside a text, or at its start."""
        head = [self._tokenizer.anchor_id] if inside else []
        return self._tokenizer.decode([*head, *ids], skip_special_tokens=self._skip)[len(head) :]

    def _held(self, text: str) -> int:
        """How many U+FFFD at the end may still become a character."""
        marks = len(text) - len(text.rstrip(REPLACEMENT))
        return min(marks, self._tokenizer.marks_per_character)

    def _release(self, text: str, stop: int) -> str:
        """Send up to `stop`, but none of the U+FFFD that are already in the prompt's text."""
        start = self._sent
        if stop <= start:
            return ""
        while self._prompt_marks and start < stop and text[start] == REPLACEMENT:
            start += 1
            self._prompt_marks -= 1
        if start < stop:
            self._prompt_marks = 0
        self._sent = stop
        return text[start:stop]

    def _restart(self, text: str) -> None:
        self._pending, self._sent, self._prompt_marks = [], 0, 0
        self._has_text = self._has_text or bool(text)

    def _shorten(self, text: str) -> str:
        """Drop pending tokens up to a boundary between characters, among invalid bytes that never end.

        A cut inside a character adds a U+FFFD, so a cut that leaves the text as it is lies between two. Four
        cuts in a row have one, unless a byte-fallback run went wrong long ago: then all its text is sent.
        """
        for cut in range(len(self._pending) - 1, len(self._pending) - 1 - _CHARACTER_TOKENS, -1):
            done = self._decode(self._pending[:cut], inside=self._has_text)
            rest = self._decode(self._pending[cut:], inside=True)
            if 0 < len(done) <= self._sent and done + rest == text:
                self._pending, self._has_text = self._pending[cut:], True
                self._sent -= len(done)
                return ""
        delta = self._release(text, len(text))
        self._restart(text)
        return delta
