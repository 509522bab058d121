"""Names as Kubernetes takes them.

The rules are its own (documentation, "Object Names and IDs" and "Labels and Selectors"), which quotes
RFC 1123 for most names and RFC 1035 for those of services.
"""

from __future__ import annotations

import hashlib
import re

LONGEST = 52
"""Characters of an object's name, 63 of a label of DNS less those that are put behind it.

A StatefulSet labels its pods with `<name>-<revision>`, where the revision has at most 10 characters; the
number of a pod takes less.
"""
_DIGITS = 8

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_PART = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_STARTS_WITH_A_LETTER = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def object_name(text: str) -> str:
    """A name for the objects of a job: `text` itself where it can be one.

    Otherwise what it says in the letters that are allowed, and 8 digits of its hash, so that different texts
    have different names. At most LONGEST characters, the first of them a letter, as a service's must be.
    """
    if len(text) <= LONGEST and _STARTS_WITH_A_LETTER.fullmatch(text):
        return text
    digits = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    kept = words if words[:1].isalpha() else f"bench-{words}"
    return f"{kept[: LONGEST - _DIGITS - 1].strip('-')}-{digits}"


def check_label(text: str) -> None:
    """Refuse, as ValueError, what is no label of DNS, as the name of a namespace is."""
    if len(text) > 63 or not _LABEL.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a name: at most 63 small letters, digits and dashes, none of them at an end"
        )


def check_subdomain(text: str) -> None:
    """Refuse, as ValueError, what is no domain of DNS, as the names of most objects are."""
    if len(text) > 253 or not all(_LABEL.fullmatch(part) for part in text.split(".")):
        raise ValueError(
            f"{text!r} is not a name: at most 253 small letters, digits, dashes and dots, and each part "
            f"between dots begins and ends with a letter or a digit"
        )


def check_key(text: str) -> None:
    """Refuse, as ValueError, what is no key of a label: `name` or `domain/name`."""
    domain, slash, name = text.rpartition("/")
    if slash:
        check_subdomain(domain)
    if len(name) > 63 or not _PART.fullmatch(name):
        raise ValueError(f"{text!r} is not a key such as disk or example.com/disk")


def check_value(text: str) -> None:
    """Refuse, as ValueError, what is no value of a label."""
    if len(text) > 63 or (text and not _PART.fullmatch(text)):
        raise ValueError(
            f"{text!r} is not a label's value: at most 63 letters, digits, dashes, dots and underscores, and "
            f"a letter or a digit at each end"
        )
