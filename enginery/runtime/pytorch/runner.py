"""Run an artifact's source model in PyTorch, as the reference for validation.

    with guarded(source.path, trust_remote_code=False):
        with TorchRunner(source, artifact.manifest, TorchOptions(precision="fp32")) as reference:
            outputs = reference(feeds)    # both by the graph's names

A model runs unchanged, with eager attention: as a whole, or as its encoder or decoder, see
`decoder`. Other models that Optimum exports as several graphs, and those whose cache has
another layout than the graph's, run through Optimum's submodels; `TorchRunner.notes` states that.
In the runtime, only this folder imports torch and transformers.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
)

from enginery.core.artifact.manifest import GraphRecord, Manifest
from enginery.core.closing import Closeable
from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    ExportError,
    InputError,
    raise_system_error,
)
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.model.files import read_logit_score
from enginery.core.model.source import ModelSource
from enginery.core.shapes import dynamic_dims
from enginery.core.trust.confinement import Confinement, confined
from enginery.core.trust.screening import screen_model
from enginery.core.versions import OPTIMUM, transformers_family
from enginery.runtime.decoder_graphs import is_cross_attention, is_decoder
from enginery.runtime.pytorch.answers import Item, RawAnswer, TorchAnswers, first_line
from enginery.runtime.pytorch.checkpoint import (
    CHANGES_ANSWERS,
    explain_load_error,
    find_unused,
    read_checkpoint,
    require_float_weights,
)
from enginery.runtime.pytorch.classes import class_for_task, feature_class
from enginery.runtime.pytorch.config import load_config
from enginery.runtime.pytorch.decoder import TorchDecoder
from enginery.runtime.pytorch.random import RandomNumbers
from enginery.runtime.pytorch.reference import TorchWeight, TorchWeights, sample_positions
from enginery.runtime.pytorch.segmenter import (
    IMAGE_ENCODER,
    PROMPT_DECODER,
    decode_prompts,
    encode_image,
    is_segmenter,
)
from enginery.runtime.pytorch.state import ModelState
from enginery.runtime.pytorch.tokenizer import load_tokenizer
from enginery.runtime.pytorch.weights import UpcastWeights, as_classifier, restore_head

_UPCAST_ON_USE_BYTES = 1 << 30
"""Size of a model's FP32 weights above which FP64 weights are made only as they are used."""

_ONE_THREAD_BYTES = 64 << 20
"""Size of a model's weights up to which one thread runs the steps of generation: to share the work
of a step takes longer than to do it."""

Feeds = Mapping[str, NDArray[Any]]
Outputs = dict[str, NDArray[Any]]
_Answer = TypeVar("_Answer")
_RunModel = Callable[[dict[str, Any]], dict[str, Any]]
"""Tensors in, tensors out, both by the graph's names."""

_SEGMENTER_PARTS = {IMAGE_ENCODER: encode_image, PROMPT_DECODER: decode_prompts}
_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@contextmanager
def guarded(
    *directories: Path, trust_remote_code: bool, writable: Iterable[Path] = ()
) -> Iterator[Confinement | None]:
    """Screen models' directories, and confine this process while the models are loaded and run.

    With `trust_remote_code`, do neither and yield None.

    Raises:
        UntrustedModelError: the model's files require permissions that the user did not grant, or
            the model attempted an operation that no model needs.
    """
    if trust_remote_code:
        yield None
        return
    for directory in directories:
        screen_model(directory, known_types=CONFIG_MAPPING)
    with confined(*directories, writable=writable) as confinement:
        yield confinement


@dataclass(frozen=True)
class TorchOptions:
    """How PyTorch loads a model."""

    precision: str = "fp32"
    """fp64, fp32, fp16 or bf16."""
    library: str = "transformers"
    """transformers or timm."""
    pickled: bool = False
    """Load pickled weights instead of safetensors."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    attention: str = "eager"
    """The attention implementation; empty for transformers' default."""


def load_pytorch(path: Path, task: str, options: TorchOptions = TorchOptions()) -> Any:
    """Load a model from a directory, in evaluation mode. Call this inside `guarded`.

    Loads only the weights that `find_weights` found; pickled ones with PyTorch's restricted
    unpickler.

    Args:
        path: the model's directory.
        task: the task, by its name in `export.tasks`.
        options: precision, files, device and attention.

    Raises:
        ExportError: PyTorch cannot load the model.
    """
    precision, device = options.precision, options.device
    keywords: dict[str, Any] = {
        # FP64 weights are made from FP32 below, or as they are used.
        "dtype": torch.float32 if precision == "fp64" else _DTYPES[precision],
        "trust_remote_code": options.trust_remote_code,
        "use_safetensors": not options.pickled,
        "weights_only": True,
        "local_files_only": True,
    }
    if options.attention:
        keywords["attn_implementation"] = options.attention
    with _quiet():
        try:
            if options.library == "timm":
                model = _from_timm(path, keywords["dtype"], device)
            else:
                model = _from_transformers(path, task, keywords, device)
        # The errors of this package have their own messages and remedies.
        except EngineryError:
            raise
        except Exception as error:  # a bad config can cause any error, anywhere in transformers
            if reason := explain_load_error(path):
                raise reason from error
            first = first_line(error)
            raise ExportError(f"PyTorch cannot load {path} for {task}: {first}") from error
    # FP64 weights take twice the memory of FP32: for a large model, upcast each as it is used.
    large = precision == "fp64" and _weights_bytes(model) > _UPCAST_ON_USE_BYTES
    return (model if large else model.to(_DTYPES[precision])).eval()


def _weights_bytes(model: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())


def _from_timm(path: Path, dtype: Any, device: str) -> Any:
    """Load a model from a directory as timm saves it."""
    import timm

    model = timm.create_model(f"local-dir:{path}", pretrained=True, exportable=True)
    require_float_weights(model, path, read_checkpoint(path))
    model = model.to(dtype).to(device)
    # As models of transformers have it; Optimum's exporter reads both.
    model.config = PretrainedConfig.from_dict(model.pretrained_cfg)
    model.config.export_model_type = model.pretrained_cfg["architecture"]
    return model


def _from_transformers(path: Path, task: str, options: dict[str, Any], device: str) -> Any:
    """Load a model of transformers with the class for the task.

    The attribute `untrained_weights` has the names of weights that no file has, which are random;
    `unused_tensors` has the tensors of the files that no weight took, `config_notes` says what of
    config.json was translated.
    """
    read = load_config(path, trust_remote_code=options["trust_remote_code"])
    config = read.config
    if read.is_newer:
        options = {**options, "config": config}
    model_class = class_for_task(task, config)
    if task == "feature-extraction" and not options["trust_remote_code"]:
        model_class = feature_class(path, config) or model_class
    score = read_logit_score(path) if task == "text-classification" else None
    with torch.device(device):
        loader = AutoModelForCausalLM if score else model_class
        # LogitScore models are language models; `as_classifier` turns their heads into classifiers.
        model, loaded = loader.from_pretrained(str(path), output_loading_info=True, **options)
    tensors = read_checkpoint(path)
    require_float_weights(model, path, tensors)
    unused = find_unused(model, config, tensors, loaded["unexpected_keys"])
    missing = set(loaded["missing_keys"])
    if read.is_newer:
        missing -= restore_head(model, path, missing)
    if score:
        model = as_classifier(model, model_class, score)
    if task == "text-classification" and getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = _pad_token_id(path, options["trust_remote_code"])
    model.untrained_weights, model.config_notes = tuple(sorted(missing)), read.notes
    model.unused_tensors = unused
    return model


def _pad_token_id(path: Path, trust_remote_code: bool) -> int | None:
    """Return the tokenizer's padding id, for a classifier whose config has none; or None.

    Classifiers of decoders find the last token of a text by it.
    """
    try:
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # no tokenizer, or one whose files transformers cannot read
        raise_system_error(error)
        return None
    return None if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


_FROZEN_EPSILON = 1e-5


class TorchRunner(Closeable):
    """A PyTorch model as the reference for one graph. A context manager; closing frees it."""

    def __init__(
        self,
        source: ModelSource,
        manifest: Manifest,
        options: TorchOptions = TorchOptions(),
        *,
        graph: str = "",
        vocoder: Path | None = None,
    ) -> None:
        """Load the model. Call this inside `guarded`.

        Args:
            source: the model, as returned by `resolve_record(manifest.source)`.
            manifest: manifest of the artifact to compare with.
            options: precision, device and attention; the library and the kind of weights are those
                of the manifest and the source.
            graph: file name of the graph; empty for the first.
            vocoder: the directory of the vocoder that a model of speech was exported with.

        Raises:
            ArtifactError: the artifact has no such graph.
            ExportError: PyTorch cannot load the model.
        """
        graphs = {record.file: record for record in manifest.graphs}
        if graph and graph not in graphs:
            raise ArtifactError(
                f"the artifact has no graph '{graph}', expected one of {', '.join(graphs)}."
            )
        self.record: GraphRecord = graphs[graph or manifest.graphs[0].file]
        self._notes: list[str] = []
        self._device = options.device
        self._float = _DTYPES[options.precision]
        self._fp64_by_default = False
        self._path, self._trust_remote_code = source.path, options.trust_remote_code
        library = "timm" if manifest.library == "timm" else "transformers"
        self._model = load_pytorch(
            source.path,
            manifest.task,
            replace(options, library=library, pickled=source.pickled),
        )
        # Before the first run: each input gets the model as it was loaded.
        self._state: Any = ModelState(self._model)
        self._decoder: TorchDecoder | None = None
        self._manifest, self._precision_name = manifest, options.precision
        # Optimum adds the vocoder that it has loaded.
        self._model_kwargs: dict[str, Any] = {"vocoder": str(vocoder)} if vocoder else {}
        self._submodels: dict[str, tuple[Any, Any]] | None = None
        self._submodel_obstacle = "does not make it"
        # A graph that is the whole model runs through its own `forward`.
        self._run: _RunModel = self._run_whole
        if len(graphs) > 1 or is_decoder(self.record):
            self._run = self._choose_part()

    @property
    def notes(self) -> list[str]:
        """How the reference runs, where that is not plain, and what it changes of itself."""
        changes = self._state.describe() if self._state else ""
        return [*self._notes, changes] if changes else self._notes

    def __call__(self, feeds: Feeds) -> Outputs:
        """Run the model on the feeds of the graph; see `run`."""
        return self.run(feeds)

    def run(self, feeds: Feeds, *, random: str = "") -> Outputs:
        """Run the model on the feeds of the graph.

        Args:
            feeds: arrays by the graph's names.
            random: an `.npz` file of the random numbers that the model draws: it is written, or if
                it exists, the model gets the numbers in it. Empty for numbers that nobody needs.

        Returns:
            Outputs by the graph's names, as float32 or wider, because numpy has no bfloat16.

        Raises:
            InputError: PyTorch itself rejects the feeds.
            EngineryError: the file cannot be written.
        """
        self._state.restore()
        with RandomNumbers.of(Path(random)) if random else nullcontext():
            return self._call(self._run, feeds)

    def decode(self, feeds: Feeds, *, resume: bool) -> Outputs:
        """Run the next tokens with the model's own cache; see `TorchDecoder.decode`.

        Raises:
            InputError: PyTorch rejects the feeds, or those before, or has no cache.
        """
        decoder = self._decoder = self._decoder or TorchDecoder(self._model, self.record)
        if not resume:
            self._state.restore()
        with self._threads_for_steps():
            return self._call(partial(decoder.decode, resume=resume), feeds)

    def generate(self, feeds: Feeds, options: Mapping[str, Any]) -> Outputs:
        """Run the model's own `generate` on one input, with the options of its own files.

        Args:
            feeds: `input_ids` and `attention_mask` of a decoder's prompt, or the encoder's inputs
                and, if its decoder's prompt has more than the start token, `decoder_input_ids`;
                with a batch of one.
            options: options in place of those of the files.

        Returns:
            `tokens`, int64 (steps,): the new tokens. Of greedy search also `scores`, float32
            (steps, vocabulary): the logits of each step as the processors have changed them. Of
            beam search `score`, float32 (): the score of the tokens.

        Raises:
            InputError: PyTorch rejects the feeds or the options.
        """

        def run(tensors: dict[str, Any]) -> dict[str, Any]:
            # Of an encoder-decoder, the sequences begin with the decoder's start token.
            generate, prompt = self._model.generate, 1
            if not self._model.config.is_encoder_decoder:
                prompt = tensors["input_ids"].shape[1]
            elif "decoder_input_ids" in tensors:
                prompt = tensors["decoder_input_ids"].shape[1]
                # Whisper's own makes the prompt itself.
                generate = partial(GenerationMixin.generate, self._model)
            output = generate(
                **tensors, **options, return_dict_in_generate=True, output_scores=True
            )
            outputs = {"tokens": output.sequences[0, prompt:]}
            if "sequences_scores" in output:
                return {**outputs, "score": output.sequences_scores[0]}
            # Each step's scores are (1, vocabulary), since the batch is one.
            return {**outputs, "scores": torch.cat(output.scores)}

        self._state.restore()
        with self._threads_for_steps():
            found = self._attempt(run, feeds)
        return {name: _array(tensor) for name, tensor in found.items()}

    def answers(self, kind: str, items: Sequence[Item]) -> list[RawAnswer]:
        """Answer raw inputs with the model's own tokenizer and processors; see `TorchAnswers`.

        Raises:
            InputError: transformers cannot load them, or nothing answers such inputs.
        """
        with _quiet(), self._precision():
            return self._answers(kind, items)

    def prepare(self, item: Item) -> Outputs:
        """Return what the model's own tokenizer or processor makes of a raw input, by name.

        Raises:
            InputError: transformers cannot load it, or it rejects the input.
        """
        tensors = self._ask("processor", lambda: self._answers.prepare(item))
        return {name: _array(tensor) for name, tensor in tensors.items()}

    @cached_property
    def _answers(self) -> TorchAnswers:
        return TorchAnswers(
            self._model,
            self._path,
            self._run,
            restore=self._state.restore,
            trust_remote_code=self._trust_remote_code,
        )

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts by the model's own tokenizer in transformers.

        Raises:
            InputError: transformers cannot load the tokenizer, or it cannot encode a text.
        """
        return self._ask(
            "tokenizer",
            lambda: [list(self._answers.tokenizer(text).input_ids) for text in texts],
        )

    def decode_tokens(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of tokens by the model's own tokenizer, without special tokens.

        Raises:
            InputError: transformers cannot load the tokenizer, or it cannot decode a token.
        """
        return self._ask(
            "tokenizer",
            lambda: [
                self._answers.tokenizer.decode(list(row), skip_special_tokens=True)
                for row in tokens
            ],
        )

    def _ask(self, part: str, answer: Callable[[], _Answer]) -> _Answer:
        """Return what a tokenizer or a processor of transformers answers."""
        try:
            with _quiet():
                return answer()
        except Exception as error:  # bad files can cause any error, anywhere in transformers
            raise InputError(f"transformers' {part} fails: {first_line(error)}") from error

    def generation_config(self) -> dict[str, Any]:
        """Return the options that `generate` has without any arguments.

        Raises:
            InputError: the model's class does not generate.
        """
        config = getattr(self._model, "generation_config", None)
        if config is None:
            raise InputError(f"{type(self._model).__name__} does not generate.")
        values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
        # transformers 5 leaves out what is not set, and takes these for it when it generates.
        defaults: dict[str, Any] = getattr(config, "_get_default_generation_params", dict)()
        return values | {n: value for n, value in defaults.items() if values.get(n) is None}

    def _call(self, run: _RunModel, feeds: Feeds) -> Outputs:
        outputs = self._attempt(run, feeds)
        return {
            spec.name: _array(outputs[spec.name])
            for spec in self.record.outputs
            if spec.name in outputs
        }

    def _attempt(self, run: _RunModel, feeds: Feeds) -> dict[str, Any]:
        """Return what a function returns for the feeds as tensors."""
        tensors = {name: self._tensor(array) for name, array in feeds.items()}
        try:
            return self._compute(lambda: run(tensors))
        # The errors that PyTorch's operators and the models' own checks raise for wrong inputs.
        # Others are bugs and pass.
        except (RuntimeError, LookupError, ValueError, TypeError, AssertionError) as error:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in feeds.items())
            first = first_line(error)
            raise InputError(f"PyTorch rejects the inputs {shapes}: {first}") from error

    def weights(self) -> TorchWeights:
        """Describe all parameters and buffers by name, shared ones under each of their names.

        A parametrized weight, such as one with weight normalization, is there as it is used, too.
        """
        modules = list(self._model.named_modules(remove_duplicate=False))
        untrained = set(getattr(self._model, "untrained_weights", ()))
        unused = getattr(self._model, "unused_tensors", ())
        return TorchWeights(
            weights={
                name: TorchWeight(name, array.shape, array[sample_positions(array.shape)])
                for name, array in self._weights.items()
            },
            linear=frozenset(n for n, module in modules if isinstance(module, torch.nn.Linear)),
            # Those of detectors, whose statistics are frozen, have no attribute for epsilon.
            batch_norms={
                name: getattr(module, "eps", _FROZEN_EPSILON)
                for name, module in modules
                if hasattr(module, "running_var")
            },
            stored=frozenset(self._model.state_dict()) - untrained,
            unused={tensor.name: prod(tensor.shape) for tensor in unused},
            lost=tuple(tensor.name for tensor in unused if tensor.kind in CHANGES_ANSWERS),
        )

    def weight(self, name: str) -> NDArray[Any]:
        """Return all elements of a weight."""
        return self._weights[name]

    @cached_property
    def _weights(self) -> Outputs:
        self._state.restore()
        tensors = dict(self._model.named_parameters(remove_duplicate=False))
        tensors |= self._model.named_buffers(remove_duplicate=False)
        for prefix, module in self._model.named_modules():
            if torch.nn.utils.parametrize.is_parametrized(module):
                tensors |= {f"{prefix}.{n}": getattr(module, n) for n in module.parametrizations}
        return {name: _array(tensor) for name, tensor in tensors.items()}

    def close(self) -> None:
        """Free the model."""
        self._model = self._decoder = self._state = None
        for name in ("_answers", "_weights"):
            self.__dict__.pop(name, None)
        self._run = self._run_whole
        self._submodels = None

    def _choose_part(self) -> _RunModel:
        """Return the function that runs the part of the model that the graph was made from."""
        if is_decoder(self.record):
            decoder = TorchDecoder(self._model, self.record)
            reason = self._cache_obstacle(decoder)
            if not reason:
                self._decoder = decoder
                return decoder.run
        elif is_segmenter(self._model) and Path(self.record.file).name in _SEGMENTER_PARTS:
            return partial(_SEGMENTER_PARTS[Path(self.record.file).name], self._model)
        elif self._is_encoder():
            return self._run_encoder
        else:
            reason = "it is neither a decoder nor the encoder of an encoder-decoder"
        self._notes.append(
            f"{self.record.file}: the reference is PyTorch through Optimum's submodels, because "
            f"{reason}"
        )
        return self._run_submodel

    def _cache_obstacle(self, decoder: TorchDecoder) -> str:
        """Return the reason why the model cannot be fed the graph's past; empty if it can."""
        names = dynamic_dims(self.record.inputs)
        # Dims of the past are longer than the others, so that a cache of another layout does not
        # fit by chance.
        sizes = {name: 3 if name.startswith("past_") else 2 for name in names}
        feeds = make_feeds(self.record.inputs, sizes, FeedLimits(vocab_size=1), seed=0)
        tensors = {name: self._tensor(array) for name, array in feeds.items()}
        try:
            self._compute(lambda: decoder.check_cache(tensors))
        except Exception as error:  # a model of any class may fail in any way
            return first_line(error)
        return ""

    def _is_encoder(self) -> bool:
        """Return True if the graph has the inputs and outputs of the model's encoder."""
        if not getattr(self._model.config, "is_encoder_decoder", False):
            return False
        taken = inspect.signature(self._model.get_encoder().forward).parameters
        return all(spec.name in taken for spec in self.record.inputs) and any(
            spec.name == "last_hidden_state" for spec in self.record.outputs
        )

    def _precision(self) -> AbstractContextManager[Any]:
        """Return the context manager that upcasts weights on use, or one that does nothing."""
        narrow = (
            self._float == torch.float64 and next(self._model.parameters()).dtype == torch.float32
        )
        return UpcastWeights(self._model) if narrow else nullcontext()

    def _compute(self, run: Callable[[], _Answer]) -> _Answer:
        """Return what PyTorch computes at the precision of the reference.

        Some models make a mask of the smallest number of their type without naming the type: that
        of FP64 does not fit the default, FP32. FP64 becomes the default for them.
        """
        with torch.inference_mode(), _quiet(), self._precision():
            if self._float != torch.float64:
                return run()
            if not self._fp64_by_default:
                try:
                    return run()
                except RuntimeError as error:
                    if "without overflow" not in str(error):
                        raise
            self._fp64_by_default = True
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            try:
                return run()
            finally:
                torch.set_default_dtype(before)

    @contextmanager
    def _threads_for_steps(self) -> Iterator[None]:
        """Run small models on one thread."""
        before = torch.get_num_threads()
        if _weights_bytes(self._model) <= _ONE_THREAD_BYTES:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _tensor(self, array: NDArray[Any]) -> Any:
        # A copy: PyTorch shares the memory of an array, warns if it is read-only, and models may
        # write to their inputs.
        tensor = torch.from_numpy(np.array(array)).to(self._device)
        return tensor.to(self._float) if tensor.is_floating_point() else tensor

    def _run_whole(self, tensors: dict[str, Any]) -> dict[str, Any]:
        if type(self._model).__module__.startswith("timm"):
            return {"logits": self._model(tensors["pixel_values"])}
        outputs = dict(self._model(**tensors, return_dict=True).items())
        # Some models name outputs otherwise than Optimum's graphs do.
        lacking = [o.name for o in self.record.outputs if not torch.is_tensor(outputs.get(o.name))]
        if lacking and Path(self.record.file).stem in self._find_submodels():
            note = (
                f"{self.record.file}: the reference of {', '.join(lacking)} is PyTorch through "
                "Optimum's submodel, because the model has no outputs of these names"
            )
            self._notes = [*dict.fromkeys([*self._notes, note])]
            outputs |= self._run_submodel(tensors)
        return outputs

    def _find_submodels(self) -> Mapping[str, tuple[Any, Any]]:
        """Return Optimum's submodels, by the graphs' file stems; none for other exporters."""
        if self._submodels is None and transformers_family() != OPTIMUM:
            self._submodels, self._submodel_obstacle = {}, "is not in this environment"
        if self._submodels is None:
            # Optimum's parts share the model, and keep what they change of its configuration.
            self._state.restore()
            try:
                self._submodels = _optimum_submodels(
                    self._model, self._manifest, self._precision_name, self._model_kwargs
                )
            except (LookupError, ValueError, TypeError) as error:  # not in its registry
                self._submodels = {}
                reason = first_line(error).rstrip(".")
                self._submodel_obstacle = f"cannot make its parts again: {reason}"
            self._state = self._state.anew(self._model)
        return self._submodels

    def _run_encoder(self, tensors: dict[str, Any]) -> dict[str, Any]:
        if any(is_cross_attention(spec.name) for spec in self.record.outputs):
            return TorchDecoder(self._model, self.record).encode(tensors)
        return dict(self._model.get_encoder()(**tensors, return_dict=True).items())

    def _run_submodel(self, tensors: dict[str, Any]) -> dict[str, Any]:
        stem = Path(self.record.file).stem
        if stem not in self._find_submodels():
            raise InputError(
                f"PyTorch cannot run {self.record.file} alone: Optimum {self._submodel_obstacle}."
            )
        model, config = self._find_submodels()[stem]
        inputs = _submodel_inputs(tensors, config)
        if "encoder_outputs" in config.torch_to_onnx_input_map.keys() - inputs.keys():
            # With a past, the encoder's keys and values come from the cache. PyTorch still needs
            # encoder outputs, of any value, to know that the encoder has run.
            rows, length = tensors["encoder_attention_mask"].shape
            width = getattr(self._model.get_encoder().config, "hidden_size", 1)
            inputs["encoder_outputs"] = (torch.zeros(rows, length, width), None, None)
        with config.patch_model_for_export(model, model_kwargs=self._model_kwargs):
            found = model(**config.rename_ambiguous_inputs(inputs))
        flat: dict[str, Any] = {}
        for name, value in found.items():
            graph_name = "present" if name == "past_key_values" else name
            if isinstance(value, (list, tuple)):
                graph_name = config.torch_to_onnx_output_map.get(graph_name, graph_name)
                flat.update(config.flatten_output_collection_property(graph_name, value))
            else:
                flat[graph_name] = value
        return flat


def _optimum_submodels(
    model: Any, manifest: Manifest, precision: str, model_kwargs: dict[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return each graph's PyTorch module and Optimum's ONNX config, by the graph's file stem."""
    import optimum.exporters.onnx.model_configs  # noqa: F401  registers the model types
    from optimum.exporters.onnx.utils import _get_submodels_and_onnx_configs

    # As at the export: it decides whether the graphs have outputs of the cache.
    model.config.use_cache = manifest.task.endswith("with-past")
    _, parts = _get_submodels_and_onnx_configs(
        model=model,
        task=manifest.task,
        monolith=False,
        custom_onnx_configs={},
        custom_architecture=False,
        # Only Optimum's dummy inputs have this type, and they know no FP64.
        float_dtype="fp32" if precision == "fp64" else precision,
        fn_get_submodels=None,
        preprocessors=None,
        _variant="default",
        library_name="transformers",
        model_kwargs=model_kwargs,
    )
    if "vocoder_model" in model_kwargs:  # Optimum has loaded it, in FP32
        model_kwargs["vocoder_model"].to(_DTYPES[precision])
    return dict(parts)


def _submodel_inputs(tensors: dict[str, Any], config: Any) -> dict[str, Any]:
    """Convert the graph's inputs to the arguments of Optimum's patched models.

    Inputs get PyTorch's names; the encoder's output becomes a tuple, and `past_key_values.0.key`, …
    become a list with one tuple per layer.
    """
    names = config.torch_to_onnx_input_map.items()
    torch_names = {graph: name for name, graph in names if name in config.inputs}
    layers: dict[str, list[Any]] = {}
    plain: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.startswith("past_key_values."):
            layers.setdefault(name.split(".")[1], []).append(tensor)
        elif torch_names.get(name) == "encoder_outputs":
            plain["encoder_outputs"] = (tensor, None, None)
        else:
            plain[torch_names.get(name, name)] = tensor
    return {**plain, "past_key_values": [tuple(v) for v in layers.values()]} if layers else plain


def _array(tensor: Any) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    # numpy has no bfloat16, and comparisons in FP16 would overflow.
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    array: NDArray[Any] = tensor.numpy()
    return array


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' log messages; errors are raised as exceptions anyway."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
