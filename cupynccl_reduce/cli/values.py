"""What options may be: one checked value from one word. Wrong ones are wrong usage, exit code 2."""

from __future__ import annotations

import argparse

__all__ = ["count", "nbytes"]

UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def count(text: str) -> int:
    """Return an integer from 1 on."""
    number = int(text)  # argparse tells of a ValueError by this function's name
    if number < 1:
        msg = f"{number} is too few; at least 1"
        raise argparse.ArgumentTypeError(msg)
    return number


def nbytes(text: str) -> int:
    """Return a number of bytes, written with a binary unit or none."""
    number = text.rstrip("KMGiBkmgb")
    unit = text[len(number) :].upper()
    if not number.isdecimal() or unit not in UNITS or int(number) < 1:
        msg = f"{text!r} is no number of bytes; write 65536, 64KiB, 64MiB or 1GiB"
        raise argparse.ArgumentTypeError(msg)
    return int(number) * UNITS[unit]
