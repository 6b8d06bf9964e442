"""Record which functions of the package run, in this process and in its children.

Python imports this module at its start if its folder is in PYTHONPATH. Each function is written
once for each phase, at its first call, because a child may be ended without notice.
"""

import inspect
import os
import sys
import threading

FILE = os.environ.get("ENGINERY_TRACE_FILE")
PACKAGE = os.environ.get("ENGINERY_TRACE_PACKAGE", "") + os.sep
phase = ""
_recorded = set()
_lock = threading.Lock()


def record(frame, event, _):
    """Write the called function, unless it runs because its module is imported."""
    code = frame.f_code
    if event != "call" or (phase, code) in _recorded:
        return
    with _lock:
        _recorded.add((phase, code))
        if not code.co_filename.startswith(PACKAGE) or not _is_named_function(code):
            return
        if _is_import(frame):
            _recorded.discard((phase, code))  # a later call counts
            return
        module = os.path.relpath(code.co_filename, PACKAGE)
        line = f"{phase}\t{module}\t{code.co_qualname}\n"
        os.write(_trace, line.encode())  # in one piece, although processes write at the same time


def _is_named_function(code):
    """Return False for the bodies of modules and classes, lambdas and comprehensions."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and not code.co_name.startswith("<")


def _is_import(frame):
    """Return True if a module of the package is being imported, other than by `python -m`."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(PACKAGE):
            return frame.f_globals.get("__name__") != "__main__"
        frame = frame.f_back
    return False


if FILE:
    _trace = os.open(FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    threading.setprofile(record)
    sys.setprofile(record)
