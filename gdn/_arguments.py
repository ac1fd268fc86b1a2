"""Integers and flags that a caller gives, read in one way everywhere: a bool or a float is no integer, nothing is cut to fit."""

import operator
from typing import Any

import numpy as np
from numpy import ma  # numpy loads it when first asked for: too late in a process without free files
from numpy.typing import NDArray


def integer(value: Any, name: str, least: int = -2**63, most: int = 2**63 - 1) -> int:
    """value as an int.  TypeError: it is none.  ValueError: it lies outside least to most."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if not least <= number <= most:
        raise ValueError(f"{name} must be {least} to {most}, got {number}")
    return number


def integers(values: Any, name: str, error: type[Exception] = ValueError) -> NDArray[np.int64]:
    """values as a C-contiguous int64 array of their shape: values itself where it is that already.

    TypeError: no integers, or a masked array.  ValueError: rows of several lengths.  `error`: an integer beyond int64.
    """
    if isinstance(values, ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array")
    try:
        array = np.asarray(values)
    except ValueError as ragged:
        raise ValueError(f"{name} must be a list of integers: {ragged}") from ragged
    if array.size:
        beyond = array.dtype.kind == "O" and all(type(value) is int for value in array.flat)
        if beyond or array.dtype == np.uint64 and array.max() > 2**63 - 1:
            raise error(f"{name} must fit in 64 signed bits (int64), got {array.max()}")
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name} must hold integers, got {array.dtype}")
    return np.asarray(array, np.int64, order="C")


def flag(value: Any, name: str) -> bool:
    """value, True or False: a word that was meant as an option is not a yes.  TypeError otherwise."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)
