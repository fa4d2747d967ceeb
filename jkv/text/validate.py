"""What any text from a request must satisfy before a tokenizer or template sees it."""

from __future__ import annotations

from jkv.errors import InvalidRequestError


def check_unicode(field: str, text: str) -> None:
    """Refuse lone surrogates: a Python str can hold them, UTF-8 and tokenizers cannot.

    Raises:
        InvalidRequestError: the text has a lone surrogate; the message names its position in `field`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            field,
            f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}; "
            "the text must be valid Unicode",
        ) from None
