"""Errors that a user can act on."""

from __future__ import annotations

import signal
from typing import final

# Exit codes of the command line where a signal has ended it: 128 and its number.
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


@final
class UserError(Exception):
    """Something the user can put right: what was wrong, where, and what would be right.

    The command line prints it without a traceback and exits with code 2.
    """


@final
class TrainingError(Exception):
    """A run that cannot go on: a broken invariant or too many skipped updates.

    The command line prints it without a traceback and exits with code 1.
    """
