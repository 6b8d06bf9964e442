"""Copy the files beside a model that its results depend on: tokenizer, image processor, pooling.

They are copied byte for byte. Saving them with transformers would change a tokenizer's padding, and
drop files that only sentence-transformers reads.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from enginery.core.errors import SourceError, UntrustedModelError
from enginery.core.json_file import json_bytes, read_json
from enginery.core.model.files import PreprocessorConfig, side_files
from enginery.core.paths import is_relative_path
from enginery.core.trust.screening import refuse_linked_out
from enginery.core.versions import TRANSFORMERS5, transformers_family

# Optimum and dynamo write these themselves, in the form that Optimum's loaders require.
_CONFIG, _GENERATION_CONFIG = "config.json", "generation_config.json"
_DONUT = ("DonutImageProcessor", "DonutImageProcessorFast", "DonutFeatureExtractor")


def copy_side_files(source: Path, out: Path, *, code: bool, config: bool = False) -> None:
    """Copy the side files of the model directory `source`.

    sentence-transformers stores its modules in numbered folders (`1_Pooling/config.json`).

    Args:
        source: the model directory.
        out: the staging directory.
        code: copy Python files too.
        config: copy config.json too.

    Raises:
        UntrustedModelError: a file is a link out of the directory, which would publish the linked
            file, or its name is invalid in a manifest.
    """
    left_out = (_GENERATION_CONFIG,) if config else (_CONFIG, _GENERATION_CONFIG)
    for name in side_files(source, code=code):
        if name in left_out:
            continue
        if not is_relative_path(name):
            raise UntrustedModelError(
                f"the name of the file {name!r} in {source} has a backslash or control characters.",
                do="Rename the file, or remove it if the model does not need it.",
            )
        refuse_linked_out((source / name).parent, source)
        refuse_linked_out(source / name, source)
        (out / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, out / name)


def name_pillow_processor(out: Path) -> None:
    """Name the class of Donut's processor in preprocessor_config.json, if it is transformers 5's.

    transformers 5 shrinks Donut's images in another way than 4.57, to other pixels. The names that
    files have are those of both; `DonutImageProcessorPil` is of transformers 5 alone.
    """
    file = out / PreprocessorConfig.FILE
    if transformers_family() != TRANSFORMERS5 or not file.is_file():
        return
    document = read_json(file)
    name = document.get("image_processor_type") or document.get("feature_extractor_type")
    if name in _DONUT:
        file.write_bytes(json_bytes(document | {"image_processor_type": "DonutImageProcessorPil"}))


def require_equal_processor(out: Path) -> None:
    """Compare the processor of images or sounds with transformers'. Call this inside `guarded`.

    Raises:
        SourceError: raw inputs would become other numbers than with transformers.
    """
    if not (out / PreprocessorConfig.FILE).is_file():
        return
    from enginery.runtime.pytorch.side_files import compare_processor

    if problem := compare_processor(out):
        raise SourceError(
            f"preprocessor_config.json: the model's inputs would be other numbers than with "
            f"transformers, so that its answers would differ: {problem}.",
            do="Remove the setting that is not supported from a copy of the file, or the file, to "
            "export the model for tensors alone.",
        )
