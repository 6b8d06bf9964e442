"""The command line's one application, and what all its commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from enginery import __version__

if TYPE_CHECKING:
    from enginery.cli.console import Console

# Stages are imported by the command that runs them: `enginery --help` shows within a blink.


def _shown_default(value: Any) -> str | None:
    """What help says of a default; nothing of an empty text or a flag that is off."""
    return None if value in ("", False, ()) else str(value)


application = App(
    name="enginery",
    help="A Hugging Face model to a validated ONNX artifact that runs on an NVIDIA GPU.",
    version=__version__,
    default_parameter=Parameter(show_default=_shown_default),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)

Flag = Annotated[bool, Parameter(negative=())]
Out = Annotated[str, Parameter(name=("--out", "-o"))]


@Parameter(name="*")
@dataclass(frozen=True)
class Output:
    """How results are shown."""

    json: Flag = False
    """Print the result as one JSON document, for programs."""
    quiet: Flag = False
    """Print the result and errors alone: no news, no progress."""
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False
    """Print every detail."""

    def console(self) -> Console:
        """The console of this command."""
        from enginery.cli.console import Console

        return Console(as_json=self.json, quiet=self.quiet, verbose=self.verbose)


OUTPUT = Output()
