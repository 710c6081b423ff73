"""Numbers as people read them."""

from __future__ import annotations

import math


def significant(value: float, digits: int = 3) -> str:
    """A number with that many significant digits and thousands separators: 0.0120, 1.20, 12.0, 1,230."""
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    return f"{round(value, decimals):,.{max(decimals, 0)}f}"


def trimmed(value: float, digits: int = 3) -> str:
    """The same without zeros at its end: 0.012, 1.2, 12, 1,230."""
    text = significant(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text else text


def binary_bytes(value: float) -> str:
    """Bytes in the largest unit that leaves at least 1: 512 B, 4 KiB, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{trimmed(value)} {unit}"
        value /= 1024
    return f"{trimmed(value)} TiB"


def seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{significant(value / size)} {unit}"
    return f"{significant(value / 1e-6)} µs"


def count(value: float) -> str:
    """1,234 as it is; from 10,000 in thousands or millions with three digits: 75.3 k, 1.2 M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size and value >= 1e4:
            return f"{trimmed(value / size)} {unit}"
    return f"{value:,.0f}"


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"
