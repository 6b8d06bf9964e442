"""The command line: one subcommand a stage. Parse, build the stage's options, run, print.

    $ enginery run
    $ enginery export org/name --task text-classification --out build/name
    $ enginery validate build/name --profile batch=1:8:32,sequence=8:64:128

Exit status: 0 when everything asked for is true, 1 when a check says no, 2 when it cannot be done,
3 when rows of predict have no answer, 130 and 143 when SIGINT or SIGTERM ended it.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module

from cyclopts import App, CycloptsError

from enginery.cli.app import Output, application
from enginery.core.errors import EngineryError, OptionError

COMMANDS = {
    "export": "export",
    "optimize": "export",
    "quantize": "export",
    "build": "export",
    "run": "export",
    "validate": "inspect",
    "lint": "inspect",
    "inspect": "inspect",
    "provider-options": "inspect",
    "doctor": "inspect",
    "bench": "bench",
    "report": "bench",
    "predict": "predict",
    "serve": "serve",
    "publish": "publish",
    "pull": "publish",
    "export-triton": "deploy",
    "export-kserve": "deploy",
    "store": "store",
}
"""Each command, and the module here that adds it."""
_TERMINATED = 128 + signal.SIGTERM


def commands(words: Sequence[str] = ()) -> App:
    """The application that can run the words: with the command they begin with, or with all.

    Reading the options of all takes several times as long as those of one.
    """
    first = words[0] if words else ""
    asked = [COMMANDS[first]] if first in COMMANDS else dict.fromkeys(COMMANDS.values())
    for name in asked:
        import_module(f"enginery.cli.{name}")
    return application


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits; an expected error is a message, not a traceback."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        # A name that the terminal's encoding lacks is shown by its number; it stops nobody.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    with _unwinding_on_sigterm(words):
        status = _status(words)
    sys.exit(status)


@contextmanager
def _unwinding_on_sigterm(words: Sequence[str]) -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does: nothing temporary is left, no process of its own.

    `serve` drains its requests by itself, and its processes listen for the signal.
    """
    if words[:1] == ["serve"] or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one would stop the tidying up
        raise SystemExit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _status(words: Sequence[str]) -> int:
    """Runs one command; its exit status."""
    try:
        commands(words)(words, exit_on_error=False, print_error=False)
    except EngineryError as error:
        failure = error
    except CycloptsError as error:
        failure = OptionError(str(error), do=f"See: {_help_of(error)}")
    except OSError as error:  # a full disk, a directory that may not be written
        place = f"{error.filename}: " if error.filename else ""
        failure = EngineryError(f"{place}{error.strerror or error}.")
    except KeyboardInterrupt:
        failure = EngineryError("interrupted.")
        failure.exit_code = 130
    except SystemExit as ended:
        if ended.code != _TERMINATED:
            raise
        failure = EngineryError("ended by SIGTERM.")
        failure.exit_code = _TERMINATED
    else:
        return 0
    with suppress(OSError):  # there may be nowhere left to say it
        Output(json="--json" in words).console().error(failure)
    return failure.exit_code


def _help_of(error: CycloptsError) -> str:
    return " ".join(["enginery", *(error.command_chain or ()), "--help"])
