"""The help of the command line: commands and options by subject, and examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

COMMAND_GROUPS = {
    "Make": ("export", "optimize", "quantize", "build", "init", "run"),
    "Check and measure": ("validate", "lint", "bench", "report", "inspect", "doctor"),
    "Use": ("try", "predict", "serve"),
    "Hand over": ("publish", "pull", "export-triton", "export-kserve"),
    "Store": ("store",),
}

_OPTION_GROUPS = {
    "Data": "data column label-column pair-column question-column context-column rows images "
    "format delimiter encoding",
    "Where it runs": "providers provider provider-option allow-fallback io-binding cuda-graph "
    "shrink-arena threads device optimized-graph",
    "Shapes": "profile min-shapes opt-shapes max-shapes batch sequence shape multiple graph "
    "engine-per-profile count",
    "Trust": "trust-remote-code allow-pickle allow-failed api-key api-key-file insecure",
    "Output": "json quiet verbose",
}
_GROUP_OF = {name: group for group, names in _OPTION_GROUPS.items() for name in names.split()}
_MAX_IN_ONE_PANEL = 12
"""Commands with up to this many options have one panel of them, and that of the output."""

EXAMPLES: Mapping[str, tuple[str, str]] = {
    "export": (
        "enginery export sentence-transformers/all-MiniLM-L6-v2 build/minilm",
        "enginery export ./my-model build/mine --task text-classification",
    ),
    "optimize": (
        "enginery optimize build/minilm build/minilm-fp16 --target tensorrt --precision fp16",
        "enginery optimize build/minilm build/minilm-cpu --target cpu",
    ),
    "quantize": (
        "enginery quantize build/minilm build/minilm-int8 --data reviews.csv --column text",
        "enginery quantize build/minilm --scheme dynamic --target cpu",
    ),
    "build": (
        "enginery build build/minilm-fp16 --capability 8.9 --profile batch=1:8:32,sequence=8:512",
        "enginery build build/minilm-fp16 --capability portable --data reviews.csv --count 3",
    ),
    "init": (
        "enginery init sentence-transformers/all-MiniLM-L6-v2 --data reviews.csv",
        "enginery init ./my-model mine.yaml --target cpu",
    ),
    "run": (
        "enginery run --model ./my-model --task text-classification",
        "enginery run recipes/minilm.yaml --check",
    ),
    "validate": (
        "enginery validate build/minilm --profile batch=1:8:32,sequence=8:64:512",
        "enginery validate build/minilm-int8 --data reviews.csv --label-column label",
    ),
    "lint": (
        "enginery lint build/minilm",
        "enginery lint model.onnx --target cuda",
    ),
    "bench": (
        "enginery bench build/minilm --against pytorch,onnxruntime",
        "enginery bench build/minilm-fp16 build/minilm-int8 --providers cuda --out build/bench",
    ),
    "report": (
        "enginery report build/minilm",
        "enginery report build/bench --json",
    ),
    "inspect": (
        "enginery inspect build/minilm --verify",
        "enginery inspect build/minilm --placement --providers cuda",
    ),
    "doctor": (
        "enginery doctor",
        "enginery doctor --require cuda",
    ),
    "try": (
        'enginery try build/minilm "The engine is warm." "The motor runs hot."',
        'enginery try build/writer "Once upon a time" --stream --set max_new_tokens=64',
    ),
    "predict": (
        "enginery predict build/minilm --input reviews.csv --out answers.parquet",
        "enginery predict build/minilm -i reviews.csv -o answers.csv --providers cuda",
    ),
    "serve": (
        "enginery serve build/minilm --port 8000",
        "enginery serve minilm=build/minilm reviews=build/reviews --providers cuda",
    ),
    "publish": (
        "enginery publish build/minilm registry --version 1.2.0",
        "enginery publish build/minilm build/minilm-fp16 hf://org/minilm --layout hub",
    ),
    "pull": (
        "enginery pull registry/minilm build/pulled",
        "enginery pull oci://registry.example/minilm:1.0 build/pulled",
    ),
    "export-triton": (
        "enginery export-triton build/minilm models --provider cuda",
        "enginery export-triton build/minilm models --backend tensorrt",
    ),
    "export-kserve": (
        "enginery export-kserve build/minilm kserve --storage-uri s3://models/a --image IMAGE",
        "enginery export-kserve build/minilm kserve --storage-uri oci://a/b --image IMAGE --gpus 2",
    ),
    "store": (
        "enginery store list",
        "enginery store prune --max-size 20GB",
    ),
}
"""Command -> two calls of it, at the end of its help."""


class HelpBySubject:
    """Format the options of a command in several panels, by subject."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one panel of cyclopts as one for each subject."""
        from cyclopts.help import DefaultFormatter

        if panel.format != "parameter":
            DefaultFormatter()(console, options, panel)
            return
        groups: dict[str, list[HelpEntry]] = {}
        has_one_panel = len(panel.entries) <= _MAX_IN_ONE_PANEL
        for entry in panel.entries:
            names = [name.removeprefix("--") for name in entry.names]
            group = next((_GROUP_OF[name] for name in names if name in _GROUP_OF), "")
            groups.setdefault("" if has_one_panel and group != "Output" else group, []).append(
                entry
            )
        show = DefaultFormatter()
        for group in ("", *_OPTION_GROUPS):
            if group in groups:
                subject_panel = panel.copy(entries=groups[group], title=group or panel.title)
                show(console, options, subject_panel)
