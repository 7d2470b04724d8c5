# SPDX-License-Identifier: Apache-2.0
"""Checks arguments other than tensors before ctypes, which truncates integers and text, takes them.
Errors name the argument, its value and the bound."""

import operator

from ._library import invalid


def text(name, value):
    """In C's form, which ends at the first NUL."""
    if not isinstance(value, str):
        raise invalid(f"{name} is {value!r}, must be a str")
    if "\0" in value:
        raise invalid(f"{name} is {value!r}, must have no NUL")
    return value.encode(errors="surrogateescape")


def optional_text(name, value):
    """As `text`; None stays None."""
    return None if value is None else text(name, value)


def integer(name, value, low, high):
    try:
        number = operator.index(value)
    except TypeError:
        raise invalid(f"{name} is {value!r}, must be an integer") from None
    if not low <= number <= high:
        raise invalid(f"{name} is {number}, must be in [{low}, {high}]")
    return number


def real(name, value):
    try:
        return float(value)
    except (TypeError, ValueError):
        raise invalid(f"{name} is {value!r}, must be a number") from None


def one_of(name, value, table):
    """The table's entry for the value."""
    if not isinstance(value, str) or value not in table:
        *others, last = table
        raise invalid(f"{name} is {value!r}, must be {', '.join(others)} or {last}")
    return table[value]


def window(value):
    """(left, right); -1 is all."""
    if value is None:
        return -1, -1
    try:
        left, right = value
    except (TypeError, ValueError):
        raise invalid(f"window is {value!r}, must be None or (left, right)") from None
    return _side("left", left), _side("right", right)


def _side(name, value):
    try:
        side = operator.index(value)
    except TypeError:
        raise invalid(f"window's {name} side is {value!r}, must be an integer") from None
    if not -1 <= side < 2**63:
        raise invalid(f"window's {name} side is {side}, must be in [-1, 2^63)")
    return side


def shape(name, value, *allowed):
    """allowed: shapes, with a name in place of each size that may be any."""
    if not any(len(value) == len(one) and all(
            isinstance(bound, str) or size == bound for size, bound in zip(value, one))
               for one in allowed):
        shapes = (str(one).replace("'", "") for one in allowed)
        raise invalid(f"{name} has shape {tuple(value)}, must be {' or '.join(shapes)}")


def names(name, value):
    """A tuple of names without repetition. A single str is refused: it would be read letter by
    letter."""
    if isinstance(value, str):
        raise invalid(f"{name} is {value!r}, must be a tuple or list of names")
    found = tuple(value)
    for n, each in enumerate(found):
        if each in found[:n]:
            raise invalid(f"{name} has {each!r} twice")
    return found
