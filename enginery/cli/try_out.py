"""The command try: one or a few inputs, answered on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Flag, Output, decode_argument
from enginery.cli.app import application as app
from enginery.core.errors import InputError, OptionError

if TYPE_CHECKING:
    from enginery.cli.console import Console
    from enginery.runtime.model import Model
    from enginery.runtime.tasks.task import Task

_SHOWN_NUMBERS = 4


@app.command(name="try")
def try_out(
    artifact: str,
    /,
    *inputs: Annotated[str, Parameter(allow_leading_hyphen=True)],
    pair: str = "",
    setting: Annotated[tuple[str, ...], Parameter(name="--set", negative=())] = (),
    stream: Flag = False,
    chat: Flag = False,
    providers: str = "",
    provider_option: tuple[str, ...] = (),
    allow_fallback: Flag = False,
    allow_failed: Flag = False,
    output: Output = OUTPUT,
) -> None:
    """Answer one or a few inputs with an artifact of any task, on the terminal.

    Parameters
    ----------
    artifact
        The artifact's directory; or a model, as for `export`, which is exported and validated on
        its first use.
    inputs
        Texts, or paths of images or sounds; - is a text from standard input. A model that answers
        questions takes a question and a context in turn, a reranker a query and a document. Without
        inputs, an example.
    pair
        The second text, for models that classify pairs of texts.
    setting
        An option of the task, `top_k=3` or `max_new_tokens=64`; repeat it for several. A list is
        JSON, `candidate_labels=["sport", "politics"]`, or its name is repeated.
    stream
        Print generated text as it is generated.
    chat
        Make a prompt of each text by the model's chat template.
    providers
        Execution providers in order of preference: tensorrt,cuda,cpu. Empty for
        `ENGINERY_PROVIDERS`, or cpu if it is not set.
    provider_option
        An option of a provider, `cuda.gpu_mem_limit=2GiB`; repeat it for several.
    allow_fallback
        Use the next provider, with a message, if the first one is not available.
    allow_failed
        Accept an artifact whose validation failed.
    """
    from enginery.core.options import read_assignments
    from enginery.first_use import open_or_make
    from enginery.runtime.model import load_model

    options = read_assignments(setting, "set")
    if stream and output.json:
        raise OptionError(
            "options 'stream' and 'json' exclude each other.", do="Leave out one of them."
        )
    console = output.console()
    with load_model(
        open_or_make(artifact, progress=console),
        providers=providers,
        provider_options=provider_option,
        allow_fallback=allow_fallback,
        allow_failed=allow_failed,
    ) as model:
        words = [_read(text) for text in inputs] or _examples(model)
        if (stream or chat) and model.method != "generate":
            raise OptionError(
                f"option '{'stream' if stream else 'chat'}' is for models that generate, but the "
                f"model {model.definition.purpose}.",
                do="Leave it out.",
            )
        if stream:
            for text in words:
                _print_pieces(console, _pieces(model, text, options, chat=chat))
            return
        items, names = _arrange(model.definition, words, pair)
        if chat:
            results: Any = [model.chat([_message(text)], **options) for text in words]
        else:
            results = model(items, **options)
        _show(console, model, names, results)
        if model.truncated:
            console.say(f"try: {model.truncated} of {len(items)} inputs were truncated")


def _read(argument: str) -> str:
    """Return an argument as text; `-` is all of standard input."""
    if argument != "-":
        return decode_argument(argument, "INPUTS")
    try:
        return sys.stdin.buffer.read().decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text: byte {error.start}.") from error


def _examples(model: Model) -> list[str]:
    """Return the texts of an example input of the model."""
    from enginery.runtime.tasks.examples import example_texts

    if texts := list(example_texts(model.artifact)):
        return texts
    kind = model.definition.modality
    raise InputError(
        f"the model {model.definition.purpose}, and no input is given.",
        do=f"Add the path of a file: enginery try {model.artifact.path} "
        f"{'picture.png' if kind == 'image' else 'speech.wav'}",
    )


def _arrange(task: Task, words: Sequence[str], pair: str) -> tuple[list[Any], list[str]]:
    """Return the inputs of the task, and the name of each for the table of answers."""
    from enginery.runtime.tasks.examples import takes_only_pairs

    fields = [field.name for field in task.inputs]
    if pair:
        if "text_pair" not in fields:
            raise OptionError(
                f"option 'pair' is given, but the model {task.purpose}.",
                do="Leave it out; it is for models that classify pairs of texts.",
                option="pair",
            )
        return [(text, pair) for text in words], list(words)
    required = [field.name for field in task.inputs if not field.optional]
    if takes_only_pairs(task):
        required = ["query", "document"]
    if len(required) < 2:
        return list(words), list(words)
    if len(words) % 2:
        first, second = required
        raise InputError(
            f"the model takes a {first} and a {second}, and {len(words)} inputs are given.",
            do=f'Give both in turn: "a {first}" "a {second}"',
        )
    pairs = list(zip(words[::2], words[1::2], strict=True))
    return pairs, [f"{first} | {second}" for first, second in pairs]


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _pieces(model: Model, text: str, options: dict[str, Any], *, chat: bool) -> Iterable[str]:
    if chat:
        return model.stream_chat([_message(text)], **options)
    return model.stream(text, **options)


def _print_pieces(console: Console, pieces: Iterable[str]) -> None:
    for piece in pieces:
        console.piece(piece)
    console.line()


def _show(console: Console, model: Model, names: Sequence[str], results: Any) -> None:
    import numpy as np

    from enginery.cli.demo import describe_results
    from enginery.runtime.tasks.results import VECTOR

    if len(results) != len(names):  # num_return_sequences
        share = len(results) // len(names)
        names = [name for name in names for _ in range(share)]
    samples = describe_results(model.definition, names, results)
    rows = [sample.row() for sample in samples]
    values = [sample.as_json() for sample in samples]
    if isinstance(results, np.ndarray):
        for row, value, vector in zip(rows, values, results, strict=True):
            shown = " ".join(f"{number:.4f}" for number in vector[:_SHOWN_NUMBERS])
            row[VECTOR] = f"{row[VECTOR]}: {shown} …"
            value[VECTOR] = [float(number) for number in vector]
    console.table("Answers", rows)
    console.json({"artifact": str(model.artifact.path), "answers": values})
