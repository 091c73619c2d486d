"""Bytes that others wrote: read as what they should be, or refused."""

from __future__ import annotations

from typing import TypeVar

import msgspec

_T = TypeVar("_T")


def decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview) -> _T:
    """msgspec.DecodeError (a ValueError) for anything that is not what ``decoder`` reads."""
    try:
        return decoder.decode(data)
    except RecursionError:  # lists within lists, a thousand deep, where an unknown part is skipped
        raise msgspec.DecodeError("nested too deeply") from None
