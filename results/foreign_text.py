"""Text that others wrote, such as a model's exception, made safe to keep and to show.

Records keep the text, shortened if it is long (`shortened`). Characters that
could act on a terminal or a page are replaced when text is shown, in the console, the page, Markdown and CSV
(`visible`). This also covers existing records. JSON has the original text, such characters written as escapes
(`in_json`).
"""

from __future__ import annotations

import codecs
import io
import re
import sys
import warnings
from traceback import format_exception

MESSAGE_CHARACTERS = 400
"""Longest message of an exception in a record."""
REASON_CHARACTERS = 2000
"""Longest reason of an outcome, which may contain messages of several ranks."""

_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tabs and line ends, marks that change the direction of text, and surrogates."""


def escape_unprintable() -> None:
    """Have this process print escapes such as `\\xe9` for characters that the encoding of its output lacks,
    instead of raising UnicodeEncodeError. It prints bytes of file names that cannot be decoded unchanged.

    Warnings and tracebacks, which Python prints as they are, become `visible`."""
    as_it_is = warnings.formatwarning
    warnings.formatwarning = lambda *given, **more: visible(as_it_is(*given, **more))
    sys.excepthook = lambda *raised: print(
        visible("".join(format_exception(*raised))), end="", file=sys.stderr
    )
    codecs.register_error("bench-escape", _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="bench-escape")


def _escaped(error: UnicodeError) -> tuple[bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    # Python decodes a byte of a file name that is not text to a character from U+DC80 on (PEP 383).
    return b"".join(
        bytes([ord(character) - 0xDC00])
        if "\udc80" <= character <= "\udcff"
        else character.encode("ascii", "backslashreplace")
        for character in lacking
    ), error.end


def visible(text: str) -> str:
    r"""The text with its acting characters written as escapes, such as `\x1b`: it is safe in a terminal."""
    return _ACTING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def in_json(document: str) -> str:
    r"""A JSON document with escapes, such as `\u009b`, for its acting characters; its values stay."""
    return _ACTING.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def shortened(text: str, most: int = MESSAGE_CHARACTERS) -> str:
    """A text; of more than `most` characters only its beginning, its end, and how many were left out."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} ... ({len(text) - most:,} characters left out) ... {text[-(most // 2) :]}"
