"""The application of the command line: its commands, the options that all share, and `main`."""

from __future__ import annotations

import inspect
import io
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Annotated, Any, cast

from cyclopts import App, CycloptsError, Group, MissingArgumentError, Parameter

from enginery.cli.console import Console, discard
from enginery.cli.help import COMMAND_GROUPS, EXAMPLES, HelpBySubject
from enginery.core.errors import EngineryError, OptionError, join_problems, printable
from enginery.core.extras import missing_package
from enginery.core.paths import require_utf8
from enginery.core.trust.resource_limits import ResourceLimits, watching_own_calls
from enginery.core.version import __version__

COMMANDS = {
    "export": "export",
    "optimize": "optimize",
    "quantize": "quantize",
    "build": "build",
    "init": "init",
    "run": "run",
    "validate": "validate",
    "lint": "lint",
    "inspect": "inspect",
    "doctor": "doctor",
    "bench": "bench",
    "report": "bench",
    "predict": "predict",
    "try": "try_out",
    "serve": "serve",
    "publish": "publish",
    "pull": "publish",
    "export-triton": "deploy",
    "export-kserve": "deploy",
    "store": "store",
}
"""The module of each command. It imports its stage when the command runs, so that `enginery --help`
stays fast."""
_OPTIMUM_OPTIONS = {
    "export": {
        "--optimize": "Optimize is a stage of its own: enginery optimize OUT NEW --target cuda "
        "--precision fp32 --level O2",
        "--fp16": "Use --dtype fp16, or better: enginery optimize OUT NEW --precision fp16",
        "--framework": "Leave it out: models are loaded with PyTorch.",
        "--library": "Leave it out: config.json tells it.",
        "--library-name": "Leave it out: config.json tells it.",
        "--monolith": "Leave it out.",
        "--atol": "Leave it out. To compare with PyTorch: enginery validate OUT",
        "--sequence_length": "Leave it out: lengths are dynamic. For engines: --profile of build",
        "--batch_size": "Leave it out: batches are dynamic. For engines: --profile of build",
        "--pad_token_id": "Leave it out, or set pad_token_id in config.json.",
    },
    "optimize": {"--onnx_model": "Name the artifact first: enginery optimize ARTIFACT OUT"},
    "quantize": {
        "--onnx_model": "Name the artifact first: enginery quantize ARTIFACT OUT",
        "--per_channel": "Leave it out: it is the default.",
        **dict.fromkeys(
            ("--arm64", "--avx2", "--avx512", "--avx512_vnni"),
            "For the CPU: enginery quantize ARTIFACT OUT --scheme dynamic --target cpu",
        ),
        "--tensorrt": "Leave it out: it is the default target, and takes --data FILE.",
    },
}
"""Options of optimum-cli that enginery does not have -> what to do instead."""
_PLACEHOLDER = "file:///missing"
"""Replaces a missing argument while the others are checked: a path, a text and an address."""
_ENDING = ("SIGTERM", "SIGHUP")
"""Signals that end a command with the status 128 + number."""


def _format_default(value: Any) -> str | None:
    """Return a default for the help; None for an empty text or a flag that is off."""
    return None if value in ("", False, ()) else str(value)


application = App(
    name="enginery",
    help="A Hugging Face model to a validated ONNX artifact that runs on an NVIDIA GPU.",
    version=__version__,
    default_parameter=Parameter(show_default=_format_default, negative_iterable=()),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    help_formatter=HelpBySubject(),
)
application.register_install_completion_command()

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
        return Console(as_json=self.json, quiet=self.quiet, verbose=self.verbose)


OUTPUT = Output()


def decode_argument(argument: str, name: str) -> str:
    """Return an argument as UTF-8 text, also if the locale is ASCII.

    Raises:
        OptionError: it is other bytes; the message has the argument's name.
    """
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"{name} {argument!a}: byte {error.start} is not UTF-8 text.") from error


def commands(arguments: Sequence[str] = ()) -> App:
    """Return the application with the command that the arguments begin with, or with all commands.

    Reading the options of all commands takes several times as long as those of one.
    """
    command = arguments[0] if arguments else ""
    names = [COMMANDS[command]] if command in COMMANDS else dict.fromkeys(COMMANDS.values())
    for name in names:
        import_module(f"enginery.cli.{name}")
    for group_position, (title, members) in enumerate(COMMAND_GROUPS.items()):
        group = Group(title, sort_key=group_position)
        for position, name in enumerate(members):
            if name in application:
                application[name].sort_key = position
                application[name].group = group
                application[name].help_epilogue = "\n\n".join(("Examples:", *EXAMPLES[name]))
    return application


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit; an EngineryError is printed as a message, not a traceback."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        # Characters that the terminal's encoding lacks are escaped instead of failing.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    argv = list(sys.argv[1:] if arguments is None else arguments)
    with _unwinding_on_signals(argv), _limiting_graphs(argv):
        status = _run(argv)
    sys.exit(status)


@contextmanager
def _unwinding_on_signals(arguments: Sequence[str]) -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that files and child processes are removed.

    A second Ctrl-C ends the process at once; the next run removes what is left then. `serve`
    handles the signals itself: it drains its requests.
    """
    if arguments[:1] == ["serve"] or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        for handled in previous:
            signal.signal(handled, signal.SIG_IGN)  # a second one would stop the cleanup
        raise SystemExit(128 + number)

    def interrupt(number: int, _: object) -> None:
        signal.signal(number, end_at_once)
        raise KeyboardInterrupt

    def end_at_once(number: int, _: object) -> None:
        with suppress(OSError):  # standard error may be closed
            os.write(2, b"error: interrupted twice.\n")
        os._exit(128 + number)

    previous = {}
    for name, handler in {**dict.fromkeys(_ENDING, end), "SIGINT": interrupt}.items():
        if number := getattr(signal, name, None):  # Windows has no SIGHUP
            previous_handler = signal.getsignal(number)
            if previous_handler != signal.SIG_IGN:  # as `nohup` sets it
                previous[number] = previous_handler
                signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)


@contextmanager
def _limiting_graphs(arguments: Sequence[str]) -> Iterator[None]:
    """End the command if ONNX Runtime needs too much memory or time for a graph.

    `serve` and `predict` run with the batches that their user chooses, and are limited from
    outside.
    """
    if arguments[:1] in (["serve"], ["predict"]):
        yield
        return

    def end(message: str) -> None:
        # Native code may run for hours, and no exception interrupts it. The next run removes what
        # is left, as after any kill.
        with suppress(OSError):
            os.write(2, f"error: {printable(message)}\n".encode())
            if "--json" in arguments:
                document = {"error": message, "do": "", "kind": "ProviderError"}
                os.write(1, f"{json.dumps(document)}\n".encode())
        os._exit(EngineryError.exit_code)

    with watching_own_calls(end):
        yield


def _run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status."""
    try:
        for argument in arguments:
            # As UTF-8, whatever the locale that Python has read the bytes with.
            as_utf8 = os.fsencode(argument).decode(errors="surrogateescape")
            require_utf8(as_utf8, error=OptionError)
        ResourceLimits.of_graph(file_bytes=0)  # the variables are valid
        adapted = _like_optimum_cli(list(arguments))
        commands(adapted)(adapted, exit_on_error=False, print_error=False)
    except EngineryError as error:
        failure = error
    except ImportError as error:
        missing = missing_package(error, f"enginery {shlex.join(arguments[:1])}")
        if missing is None:
            raise
        failure = missing
    except MissingArgumentError as error:
        failure = _missing_arguments(adapted, error)
    except CycloptsError as error:
        failure = OptionError(str(error), do=f"See: {_help_of(error)}")
    except UnicodeEncodeError as error:
        if error.reason != "surrogates not allowed":
            raise
        text = os.fsencode(error.object[max(0, error.start - 60) : error.end + 20])
        shown = text.decode(errors="backslashreplace")
        failure = EngineryError(
            f"a name in '…{shown}…' is not valid UTF-8.", do="Rename the file or folder."
        )
    except OSError as error:  # a full disk, a directory that may not be written
        prefix = f"{error.filename}: " if error.filename else ""
        if not prefix and not _flushes(sys.stdout):
            prefix = "standard output cannot be written: "
        failure = EngineryError(f"{prefix}{error.strerror or error}.")
    except KeyboardInterrupt:
        failure = EngineryError("interrupted.")
        failure.exit_code = 130
    except SystemExit as ended:
        name = next((n for n in _ENDING if ended.code == 128 + getattr(signal, n, -1000)), "")
        if not name:
            raise
        failure = EngineryError(f"ended by {name}.")
        failure.exit_code = cast("int", ended.code)
    else:
        return 0
    with suppress(OSError):  # standard error may be closed
        Output(json="--json" in arguments).console().error(failure)
    return failure.exit_code


def _flushes(stream: IO[str]) -> bool:
    """Return False, and drop what is buffered, if the stream cannot be written."""
    try:
        stream.flush()
    except OSError:
        discard(stream)
        return False
    return True


def _like_optimum_cli(arguments: list[str]) -> list[str]:
    """Return `export --model M OUT` as `export M OUT`.

    Raises:
        OptionError: the model of `export` is `onnx`, as after `optimum-cli export`, or an option is
            one that only optimum-cli has.
    """
    instead = _OPTIMUM_OPTIONS.get(arguments[0] if arguments else "", {})
    for argument in arguments:
        option = argument.partition("=")[0]
        if option in instead:
            raise OptionError(
                f"enginery {arguments[0]} has no option '{option}'.", do=instead[option]
            )
    if arguments[:1] != ["export"]:
        return arguments
    has_format = arguments[1:2] == ["onnx"] and not Path("onnx").exists()
    arguments = [*arguments[:1], *arguments[2 if has_format else 1 :]]
    corrected = arguments
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--model", "-m"):
            after = index + (1 if equals else 2)
            model = [value] if equals else arguments[index + 1 : after]
            corrected = ["export", *model, *arguments[1:index], *arguments[after:]]
            break
    if has_format:
        raise OptionError(
            "enginery export takes no format: it always writes ONNX.",
            do=f"Leave it out: {shlex.join(['enginery', *corrected])}",
        )
    return corrected


def _missing_arguments(arguments: Sequence[str], first: MissingArgumentError) -> OptionError:
    """Return an error that names every missing argument, and the problems of the others.

    A missing argument is replaced, and the arguments are parsed again, until none is missing.
    """
    completed, names, shown = list(arguments), list[str](), list[str]()
    error: CycloptsError | OptionError | None = first
    while isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.argument.name
        if name in names or "--" in completed:  # it has no value; after -- there are no options
            break
        names.append(name)
        is_option = error.argument.field_info.kind is inspect.Parameter.KEYWORD_ONLY
        shown.append(name if is_option else name.removeprefix("--").upper())
        completed.append(f"{name}={_PLACEHOLDER}")
        try:
            commands(completed).parse_args(completed, exit_on_error=False, print_error=False)
            error = None
        except (CycloptsError, OptionError) as next_error:
            error = next_error
    message = str(first)
    if names and not set(names) & set(arguments):
        message = f"{', '.join(shown)} {'is' if len(names) == 1 else 'are'} missing."
    problems = [OptionError(message, do=f"See: {_help_of(first)}")]
    if isinstance(error, OptionError):
        problems.append(error)
    elif not isinstance(error, MissingArgumentError | None) and _PLACEHOLDER not in str(error):
        problems.append(OptionError(str(error)))
    return join_problems(problems)


def _help_of(error: CycloptsError) -> str:
    return " ".join(["enginery", *(error.command_chain or ()), "--help"])
