"""What the command line does, one module per command; `laprune.cli` only reads the arguments."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right: shown as one line, without a traceback."""
