"""Python's search for garbage, put off while many objects are made of which none is garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def put_off() -> Iterator[None]:
    """Make no search for cycles inside this block, or this function where it decorates one.

    A search looks at every container of the process, and tens of thousands of new ones set off
    several: with a large model each takes most of a second. It comes once, afterwards. Where it
    is off already it stays so; blocks may be nested, and run in several threads at a time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
