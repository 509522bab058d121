"""How a process ended, in words."""

from __future__ import annotations

import signal


def exit_words(code: int) -> str:
    """How a process ended, by its return code: below zero a signal's number."""
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """A signal's name, such as SIGKILL; a number without one as it is."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
