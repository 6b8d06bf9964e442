"""Account for the tensors of a checkpoint that no parameter of the loaded model took.

transformers loads what fits and warns about the rest. What is left may be a head of another task;
or the scales of quantized weights, or an adapter, without which every answer is another one.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open

from enginery.core.errors import ExportError
from enginery.core.json_file import read_json
from enginery.core.model.weights import find_local_weights

UnusedKind = Literal["adapter", "extra", "head", "constant", "zeros"]

CHANGES_ANSWERS: tuple[UnusedKind, ...] = ("adapter", "extra")
"""Kinds of tensors without which the answers are other ones than those that were trained."""

_QUANTIZED = re.compile(
    r"(^|[._:])("
    # GPTQ and AWQ
    r"qweight|qzeros|g_idx|qscales?|"
    # compressed-tensors, ModelOpt, fine-grained FP8, EETQ, FBGEMM
    r"(weight|input|output|activation|act|k|v|q|kv|pre_quant|smooth)_scales?(_\d+|_inv|_ub)?|"
    r"(weight|input|output|k|v|q)_(zero_point|g_idx|shape|packed|global_scale)|packed_weight|"
    r"scale_(weight|input)|scaled_fp8|scale_inv|zero_points?|zeros|scales|_?amax|"
    # bitsandbytes
    r"SCB|CB|weight_format|(nested_)?absmax|(nested_)?quant_map|quant_state|"
    # Quanto, HQQ, AQLM, VPTQ, torch.ao
    r"weight_?q|W_q|_data|_scale|_shift|codes|codebooks?|centroids|qdata|_packed_params"
    r")([.:]|$)"
)
"""Names of the parts of quantized weights, as the libraries that write them call them."""

_ADAPTER = re.compile(
    r"(^|[._])(lora|lora_[A-Za-z]\w*|adapters?|adapter_\w+|ia3\w*|loha|lokr|hada_\w+|vera_\w+|"
    r"oft_\w+|boft_\w+|prompt_(encoder|embeddings?)|prefix_(encoder|embeddings?)|"
    r"base_layer|modules_to_save)([.]|$)"
)
_CONSTANT = re.compile(
    r"(^|[.])(position_ids|token_type_ids|num_batches_tracked|(original_)?inv_freq|masked_bias|"
    r"attn_mask|causal_mask|relative_position_index|relative_coords_table|version|_float_tensor|"
    r"embed_positions\.weights|"
    # Read in training alone: what stands for hidden inputs, and what DeBERTa v3 adds to the
    # embeddings of its generator.
    r"mask_token|masked_spec_embed|(word|position)_embeddings\._weight)$"
)
_HEAD = re.compile(
    r"^((\w*_)?(head|heads|classifier|classifiers|predictions|prediction|predictor|cls|pooler|"
    r"qa_outputs|seq_relationship|score|summary)(_\w+)?|"
    r"lm_\w+|mlm_\w+|nsp_\w+|sop_\w+|final_logits_bias|logits_proj)([.]|$)"
)
"""First words of heads that no class of the model's type has, such as `v_head` of a reward model
or `lm_predictions` of DeBERTa's own code."""

_WRAPPERS = re.compile(r"(^|(?<=\.))(module|_orig_mod|_fsdp_wrapped_module|base_layer)\.")
"""Words that DataParallel, torch.compile, FSDP and PEFT put into the names of weights."""

_NARROW = ("I8", "U8", "int8", "uint8", "F4", "float4", "F6")
_FP8 = ("F8", "float8")


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint's files."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors or torch names it: F32, F8_E4M3, float16, …"""
    file: Path

    @property
    def is_quantized(self) -> bool:
        """True for a weight of integers; masks of attention are none."""
        if _CONSTANT.search(self.name):
            return False
        if _QUANTIZED.search(self.name) and self.dtype in ("I32", "int32"):
            return True  # several numbers in one
        is_weight = self.name.endswith("weight") and len(self.shape) > 0
        return self.dtype.startswith(_NARROW) and (is_weight or len(self.shape) in (2, 3))

    @property
    def is_fp8(self) -> bool:
        """True for numbers of eight bits, which mean little without their scales."""
        return self.dtype.startswith(_FP8)


@dataclass(frozen=True)
class UnusedTensor:
    """A tensor of a checkpoint that no parameter of the model took."""

    name: str
    shape: tuple[int, ...]
    kind: UnusedKind
    owner: str = ""
    """The class of transformers that has it; empty for other kinds than `head`."""


def read_checkpoint(path: Path) -> list[CheckpointTensor]:
    """Return the tensors of the files that transformers loads, without reading their values.

    Raises:
        SourceError: there are no weights, or an index names missing files.
    """
    tensors = []
    for name in find_local_weights(str(path), path, allow_pickle=True).files:
        file = path / name
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as stored:
                for key in stored.keys():  # noqa: SIM118  safetensors' handle, not a dict
                    part = stored.get_slice(key)
                    shape = tuple(part.get_shape())
                    tensors.append(CheckpointTensor(key, shape, str(part.get_dtype()), file))
        else:
            state = torch.load(file, map_location="meta", weights_only=True)
            tensors += [
                CheckpointTensor(key, tuple(value.shape), str(value.dtype)[6:], file)
                for key, value in state.items()
                if torch.is_tensor(value)
            ]
    return tensors


def require_float_weights(model: Any, path: Path, tensors: Sequence[CheckpointTensor]) -> None:
    """Raise ExportError if weights are integers, or FP8 of a checkpoint that has scales.

    PyTorch copies such numbers into the parameters as they are.

    Args:
        model: the loaded model.
        path: its directory.
        tensors: the checkpoint.
    """
    if getattr(model, "hf_quantizer", None):  # transformers itself has read the scales
        narrow = [name for name, weight in model.named_parameters() if weight.element_size() < 2]
        if narrow:
            raise _quantized(path, narrow)
        return
    if integers := [tensor.name for tensor in tensors if tensor.is_quantized]:
        raise _quantized(path, integers)
    eight_bits = [tensor.name for tensor in tensors if tensor.is_fp8]
    if eight_bits and (_method(path) or any(_QUANTIZED.search(t.name) for t in tensors)):
        raise _quantized(path, eight_bits)


def explain_load_error(path: Path) -> ExportError | None:
    """Return why a checkpoint with quantized weights cannot be loaded; None for another one."""
    try:
        tensors = read_checkpoint(path)
    except Exception:  # a damaged file, which is the error
        return None
    narrow = [tensor.name for tensor in tensors if tensor.is_quantized or tensor.is_fp8]
    named = [tensor.name for tensor in tensors if _QUANTIZED.search(tensor.name)]
    if narrow or (named and _method(path)):
        return _quantized(path, narrow or named)
    return None


def find_unused(
    model: Any, config: Any, tensors: Sequence[CheckpointTensor], unexpected: Collection[str]
) -> list[UnusedTensor]:
    """Return the tensors that no parameter took, and what they are.

    Args:
        model: the loaded model.
        config: the configuration of the whole model, of which the loaded one may be a part.
        tensors: the checkpoint.
        unexpected: the names that transformers reports; a few without the base model's prefix.

    Raises:
        ExportError: they are parts of quantized weights.
    """
    stored = {tensor.name: tensor for tensor in tensors}
    prefix = f"{model.base_model_prefix}."
    names = {name: stored.get(name) or stored.get(prefix + name) for name in unexpected}
    path = tensors[0].file.parent if tensors else Path()
    # transformers reads the names of an index alone: it never sees others of the same files.
    listed = _indexed(path)
    if listed is not None:
        names |= {name: tensor for name, tensor in stored.items() if name not in listed}
    owners = _OtherClasses(model, config)
    unused = []
    scales = []
    eight_bits = any(tensor.is_fp8 for tensor in tensors)
    for name, tensor in sorted(names.items()):
        shape = tensor.shape if tensor else ()
        if _CONSTANT.search(name) or _is_mask(name, shape):
            unused.append(UnusedTensor(name, shape, "constant"))
        elif owner := owners.of(name):
            unused.append(UnusedTensor(name, shape, "head", owner))
        elif _ADAPTER.search(name):
            unused.append(UnusedTensor(name, shape, "adapter"))
        elif _QUANTIZED.search(name) or (eight_bits and owners.is_inside(name)):
            scales.append(name)
        elif tensor and name.endswith("bias") and _is_zero(tensor):
            unused.append(UnusedTensor(name, shape, "zeros"))
        elif _HEAD.search(name) and not owners.is_inside(name):
            unused.append(UnusedTensor(name, shape, "head"))
        else:
            unused.append(UnusedTensor(name, shape, "extra"))
    if scales:
        raise _quantized(path, scales)
    return unused


def find_renamed(missing: Collection[str], unused: Sequence[UnusedTensor]) -> dict[str, str]:
    """Return the missing weights that the checkpoint has under another name, by that name.

    >>> find_renamed(["a.weight"], [UnusedTensor("module.a.weight", (2,), "extra")])
    {'module.a.weight': 'a.weight'}
    """
    renamed = {}
    plain = {_WRAPPERS.sub("", name): name for name in missing}
    for tensor in unused:
        bare = _WRAPPERS.sub("", tensor.name)
        words = bare.split(".")
        tails = (".".join(words[start:]) for start in range(max(1, len(words) - 1)))
        match = next((plain[tail] for tail in tails if tail in plain), None)
        if match is not None:
            renamed[tensor.name] = match
    return renamed


def describe_names(names: Sequence[str], count: int = 4) -> str:
    """Return the first names, and how many there are.

    >>> describe_names(["a", "b", "c"], count=2)
    'a, b, … (3 tensors)'
    """
    if len(names) <= count:
        return ", ".join(names)
    return f"{', '.join(names[:count])}, … ({len(names)} tensors)"


class _OtherClasses:
    """The weights that other classes of the same model type have, such as heads of other tasks."""

    def __init__(self, model: Any, config: Any) -> None:
        self._model, self._configs = model, (config, model.config)
        self._prefix = f"{model.base_model_prefix}."
        self._modules = {name for name, _ in model.named_modules()}
        self._owners: dict[str, str] | None = None

    def of(self, name: str) -> str:
        """Return the class that has a weight of this name; empty if none has it."""
        if self._owners is None:
            self._owners = dict(self._read())
        # As TensorFlow's LayerNorm calls them; transformers renames them, too.
        legacy = name.replace("gamma", "weight").replace("beta", "bias")
        names = (name, legacy, self._prefix + name, name.removeprefix(self._prefix))
        return next((self._owners[n] for n in names if n in self._owners), "")

    def is_inside(self, name: str) -> bool:
        """Return True if the tensor lies beside the weights of a part that the model has."""
        first = name.removeprefix(self._prefix).split(".", 1)[0]
        return first in self._modules or self._prefix + first in self._modules

    def _read(self) -> Iterator[tuple[str, str]]:
        from transformers import PreTrainedModel

        try:
            from transformers.initialization import no_init_weights
        except ImportError:  # before transformers 5
            from transformers.modeling_utils import no_init_weights

        own = type(self._model)
        classes: list[Any] = [
            item
            for item in vars(sys.modules[own.__module__]).values()
            if isinstance(item, type)
            and issubclass(item, PreTrainedModel)
            and item.__module__ == own.__module__
            and item is not own
        ]
        # The last one of several that have a weight is named: the checkpoint's own.
        named = {name for config in self._configs for name in config.architectures or ()}
        for model_class in sorted(classes, key=lambda item: item.__name__ in named):
            for config in self._configs:
                if not isinstance(config, model_class.config_class or ()):
                    continue
                try:
                    with torch.device("meta"), no_init_weights():  # without memory
                        other = model_class(copy.deepcopy(config))
                except Exception:  # noqa: S112  it needs more than a configuration
                    continue
                yield from ((name, model_class.__name__) for name in other.state_dict())
                break


def _quantized(path: Path, names: Sequence[str]) -> ExportError:
    method = _method(path)
    by = f" (config.json says {method})" if method else ""
    return ExportError(
        f"{path} holds quantized weights{by}, which would be read without their scales: "
        f"{describe_names(names)}.",
        do="Export the model that it was quantized from, or save it dequantized; "
        "`enginery quantize` then makes INT8 of the artifact.",
    )


def _method(path: Path) -> str:
    """Return the library that quantized a model, by its settings; empty if none says so."""
    for file, keys in (
        ("config.json", ("quantization_config", "compression_config")),
        ("hf_quant_config.json", ("producer", "quantization")),
        ("quantize_config.json", ()),
        ("quant_config.json", ()),
    ):
        if not (path / file).is_file():
            continue
        document = read_json(path / file)
        if not keys:
            return str(document.get("quant_method") or file)
        parts = [document.get(key) for key in keys]
        parts += [document["text_config"].get(key) for key in keys if _has_text(document)]
        for part in parts:
            if isinstance(part, dict):
                name = part.get("quant_method") or part.get("name") or part.get("quant_algo")
                return str(name or keys[0])
    return ""


def _has_text(document: Mapping[str, Any]) -> bool:
    return isinstance(document.get("text_config"), dict)


def _indexed(path: Path) -> set[str] | None:
    """Return the names in the index of a sharded checkpoint; None without one."""
    files = find_local_weights(str(path), path, allow_pickle=True).files
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (path / name).is_file():
            weight_map = json.loads((path / name).read_text(encoding="utf-8"))["weight_map"]
            if set(weight_map.values()) == set(files):
                return set(weight_map)
    return None


def _is_mask(name: str, shape: Sequence[int]) -> bool:
    """Return True for the causal mask that GPT-2 and its like once kept as `attn.bias`."""
    return name.endswith(".bias") and len(shape) == 4 and shape[:2] == (1, 1)


def _is_zero(tensor: CheckpointTensor) -> bool:
    return not torch.count_nonzero(_value(tensor))


def _value(tensor: CheckpointTensor) -> Any:
    if tensor.file.suffix == ".safetensors":
        with safe_open(tensor.file, framework="pt") as stored:
            return stored.get_tensor(tensor.name)
    return torch.load(tensor.file, map_location="cpu", weights_only=True)[tensor.name]
