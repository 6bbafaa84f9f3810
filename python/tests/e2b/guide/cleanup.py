"""Two ways to leave no sandbox behind, though the work in it breaks."""

from contextlib import suppress

from cove.e2b import CodeInterpreter

with suppress(KeyError), CodeInterpreter() as by_block:
    raise KeyError("of the work")

with suppress(KeyError):
    by_hand = CodeInterpreter()
    try:
        raise KeyError("of the work")
    finally:
        ended = by_hand.close()
