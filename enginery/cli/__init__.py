"""The command line: one subcommand a stage. Parse, build the stage's options, run, print.

    $ enginery run
    $ enginery export org/name --task text-classification --out build/name
    $ enginery validate build/name --profile batch=1:8:32,sequence=8:64:128

Exit status: 0 when everything asked for is true, 1 when a check says no, 2 when it cannot be done,
3 when rows of predict have no answer.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from cyclopts import CycloptsError

from enginery.cli import (  # noqa: F401  each adds its commands
    looking,
    making,
    measuring,
    predicting,
    serving,
    store,
)
from enginery.cli.app import Output
from enginery.cli.app import application as app
from enginery.core.errors import EngineryError, OptionError

__all__ = ["app", "main"]


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
    sys.exit(_status(words))


def _status(words: Sequence[str]) -> int:
    """Runs one command; its exit status."""
    try:
        app(words, exit_on_error=False, print_error=False)
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
    else:
        return 0
    with suppress(OSError):  # there may be nowhere left to say it
        Output(json="--json" in words).console().error(failure)
    return failure.exit_code


def _help_of(error: CycloptsError) -> str:
    return " ".join(["enginery", *(error.command_chain or ()), "--help"])
