"""What a run was for, where it was, how long it took and what went wrong, in the log."""

import logging
import time

from cove.e2b import CodeInterpreter

log = logging.getLogger("usage")


def noted(code, **labels):
    log.info("asked for: %s", labels)
    with CodeInterpreter() as sandbox:
        begun = time.monotonic()
        cell = sandbox.notebook.exec_cell(code)
        log.info("%s took %.2f seconds", sandbox.id, time.monotonic() - begun)
    if cell.error:
        log.error("it failed: %s", cell.error.name)
    return cell
