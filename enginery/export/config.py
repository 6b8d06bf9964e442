"""The options of the export stage. The module imports little, to keep `enginery --help` fast."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from enginery.core.errors import OptionError
from enginery.core.options import by_content, not_in_key

_OPSETS = range(7, 24)
"""ONNX_MIN_OPSET to ONNX_MAX_OPSET of torch.onnx, 2.13."""
DEFAULT_OPSET = 20
"""The opset that `auto` stands for, except for an .onnx file."""


@dataclass(frozen=True)
class ExportConfig:
    """The task, precision, exporter and trust of an export."""

    task: str = "auto"
    """The task, as Optimum or transformers' pipelines name it: text-classification, ner, … `auto`
    infers it as Optimum does."""
    revision: str = not_in_key("main")  # the hashes of the files that it names are in the key
    """The Hub revision: a branch, a tag or a commit."""
    opset: int | Literal["auto"] = "auto"
    """The ONNX operator set: 7 to 23. `auto` is 20, and for an .onnx file its own; a later one
    converts the file."""
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """The type in which the model's weights are loaded and exported."""
    exporter: Literal["auto", "optimum", "transformers", "dynamo"] = "auto"
    """`optimum` needs transformers 4.57, `transformers` is the exporter of transformers 5, and
    `dynamo` is torch's own. `auto` is Optimum where it is installed and has the model's type, and
    else the first of the others that writes a graph equal to the model."""
    device: str = "cpu"
    """The device on which PyTorch traces the model: cpu, cuda or cuda:N."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only use it for authors you trust."""
    allow_pickle: bool = not_in_key(False)  # a permission
    """Load pickled weights, with PyTorch's restricted unpickler."""
    allow_unused: bool = False
    """Export a model without tensors of its checkpoint that no weight takes: adapters, layers that
    config.json does not have. Without it they are an error."""
    cache_dir: str = not_in_key()  # where files are, not what is in them
    """The directory for Hub downloads; empty for the default cache of the Hub library."""
    python: str = not_in_key()  # the versions of its packages are
    """The interpreter of another environment that exports the model, such as
    ~/transformers5/bin/python; empty for the variable `ENGINERY_EXPORT_PYTHON`, or this one."""
    layout: Literal["enginery", "optimum"] = "enginery"
    """The graphs of a model with a cache. `enginery`: one decoder, for the last position's logits,
    and an encoder that also computes the cross-attention's keys and values. `optimum`: Optimum's
    graphs, for its ORTModel classes."""
    model_kwargs: dict[str, str] = by_content(default_factory=dict)
    """What Optimum needs beside the model, as JSON: `{"vocoder": "org/name"}` names the vocoder of
    SpeechT5, like the model itself."""
    dims: tuple[str, ...] = ()
    """The dims of an .onnx file's input, such as `x=batch,3,height,width`: a name or a number for
    each axis. A number fixes a dynamic dim. Repeat it for other inputs."""
    resize: str = ""
    """The size of images for an .onnx file, such as `320` or `480x640` (height × width); empty for
    the graph's own size, and if that is dynamic for each image's own."""
    rescale: str = ""
    """The factor that pixels from 0 to 255 are multiplied with for an .onnx file: `1/255`, which
    is the default, or `1`."""
    mean: str = ""
    """What is subtracted from rescaled pixels for an .onnx file: a number, or one for each channel,
    such as `0.485,0.456,0.406`. The default is 0."""
    std: str = ""
    """What pixels without the mean are divided by, like `mean`. The default is 1."""
    channel_order: Literal["auto", "rgb", "bgr", "gray"] = "auto"
    """The channels of images for an .onnx file. `auto` is rgb, and gray for one channel."""


def check_options(config: ExportConfig, *, is_onnx: bool = False) -> None:
    """Raise OptionError for a value that no model can be exported with.

    Args:
        config: the options.
        is_onnx: True if the model is an .onnx file.
    """
    if config.opset != "auto" and config.opset not in _OPSETS:
        raise OptionError(
            f"option 'opset' is {config.opset}, expected {_OPSETS[0]} to {_OPSETS[-1]}.",
            do=f"Leave it out for {DEFAULT_OPSET}, which TensorRT and quantizing work with.",
            option="opset",
        )
    for name in config.model_kwargs:
        if name != "vocoder" or is_onnx or config.exporter not in ("auto", "optimum"):
            raise OptionError(
                f"option 'model_kwargs' has '{name}', but it can only have 'vocoder', for models "
                "that Optimum exports.",
                do="Leave it out.",
                option="model_kwargs",
            )
    if config.dims and not is_onnx:
        raise OptionError(
            "option 'dims' is given, but only the dims of an .onnx file can be chosen: the "
            "exporter names those of other models.",
            do="Leave it out.",
            option="dims",
        )
    for text in config.dims:
        parse_input_dims(text)
    images = image_options(config)
    if images and not is_onnx:
        raise OptionError(
            f"option '{images[0]}' is given, but other models than .onnx files come with "
            "the settings of their images, preprocessor_config.json.",
            do="Leave it out.",
            option=images[0],
        )
    parse_image_options(config)
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", config.device):
        raise OptionError(
            f"option 'device' is '{config.device}', expected cpu, cuda or cuda:N.",
            do="Leave it out for cpu.",
            option="device",
        )
    if (config.dtype, config.device, config.exporter) == ("bf16", "cpu", "optimum"):
        raise OptionError(
            "option 'dtype' is bf16: Optimum runs the graph while it exports, and ONNX Runtime has "
            "no BF16 kernels on the CPU.",
            do="Use --device cuda, or leave --exporter out.",
            option="dtype",
        )


_IMAGE_OPTIONS = ("resize", "rescale", "mean", "std", "channel_order")
_MAX_EDGE = 2**14


def image_options(config: ExportConfig) -> list[str]:
    """Return the names of the options for images that are set."""
    return [name for name in _IMAGE_OPTIONS if getattr(config, name) not in ("", "auto")]


def parse_image_options(config: ExportConfig) -> dict[str, Any]:
    """Return the keys of preprocessor_config.json that the options for images set; {} without any.

    >>> parse_image_options(ExportConfig(resize="480x640", mean="0.5"))["size"]
    {'height': 480, 'width': 640}

    Raises:
        OptionError: one has another form.
    """
    if not image_options(config):
        return {}
    sides = config.resize.split("x") if config.resize else []
    if len(sides) > 2 or not all(re.fullmatch("[1-9][0-9]{0,4}", side) for side in sides):
        raise _image_option("resize", config.resize, "320, or 480x640 for height and width")
    if any(int(side) > _MAX_EDGE for side in sides):
        raise _image_option("resize", config.resize, f"up to {_MAX_EDGE} pixels")
    factor = re.fullmatch(r"(?:1/)?[0-9]+(?:\.[0-9]+)?", config.rescale or "1/255")
    above, _, below = (config.rescale or "1/255").rpartition("/")
    if factor is None or not 0 < float(below) <= 1000:
        raise _image_option("rescale", config.rescale, "1/255, or a number")
    settings = {
        "image_processor_type": "RawImageProcessor",
        "do_resize": bool(sides),
        "rescale_factor": 1 / float(below) if above else float(below),
        "image_mean": _numbers("mean", config.mean or "0"),
        "image_std": _numbers("std", config.std or "1"),
        "channel_order": None if config.channel_order == "auto" else config.channel_order,
    }
    if sides:
        settings["size"] = {"height": int(sides[0]), "width": int(sides[-1])}
    return settings


def _numbers(name: str, text: str) -> list[float]:
    """Return the numbers of `mean` or `std`, one or one for each channel."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    bounded = all(math.isfinite(n) and abs(n) <= 1e6 for n in numbers)  # NaN is never compared
    if len(numbers) not in (1, 3) or not bounded or (name == "std" and min(numbers) <= 0):
        above = " above 0" if name == "std" else ""
        raise _image_option(name, text, f"a number{above}, or three, such as 0.485,0.456,0.406")
    return numbers


def _image_option(name: str, text: str, expected: str) -> OptionError:
    return OptionError(f"option '{name}' is '{text}', expected {expected}.", option=name)


def parse_input_dims(text: str) -> tuple[str, list[int | str]]:
    """Return the input and the dims that one `dims` option names.

    >>> parse_input_dims("x=batch,3,height,width")
    ('x', ['batch', 3, 'height', 'width'])

    Raises:
        OptionError: it has another form.
    """
    name, _, listed = text.rpartition("=")
    dims = [dim.strip() for dim in listed.split(",")]
    if not name or not all(re.fullmatch(r"[a-z][a-z0-9_]*|[1-9][0-9]{0,8}", dim) for dim in dims):
        raise OptionError(
            f"option 'dims' is '{text}', expected an input's name and a name in lower case or a "
            "number for each of its axes.",
            do="Write it as x=batch,3,height,width.",
            option="dims",
        )
    return name.strip(), [int(dim) if dim.isdigit() else dim for dim in dims]
