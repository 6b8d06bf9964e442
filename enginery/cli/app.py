"""The application of the command line, and the options that all commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from enginery.core.version import __version__

if TYPE_CHECKING:
    from enginery.cli.console import Console

# Each command imports its stage when it runs, which keeps `enginery --help` fast.


def _format_default(value: Any) -> str | None:
    """Return a default for the help; None for an empty text or a flag that is off."""
    return None if value in ("", False, ()) else str(value)


application = App(
    name="enginery",
    help="A Hugging Face model to a validated ONNX artifact that runs on an NVIDIA GPU.",
    version=__version__,
    default_parameter=Parameter(show_default=_format_default),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)

Flag = Annotated[bool, Parameter(negative=())]
Out = Annotated[str, Parameter(name=("--out", "-o"))]


@Parameter(name="*")
@dataclass(frozen=True)
class Output:
    """How results are printed."""

    json: Flag = False
    """Print the result as one JSON document, for programs."""
    quiet: Flag = False
    """Print only the result and errors, no progress."""
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False
    """Print every detail."""

    def console(self) -> Console:
        """Return the console of this command."""
        from enginery.cli.console import Console

        return Console(as_json=self.json, quiet=self.quiet, verbose=self.verbose)


OUTPUT = Output()
