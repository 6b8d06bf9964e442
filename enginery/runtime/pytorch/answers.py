"""Answer raw inputs as a user of transformers would, as the reference for what an artifact answers.

    answers = TorchAnswers(model, source.path, run_model)
    answers("classify", [{"text": "The engine is warm."}]).answers[0]    # {"LABEL_0": 0.73, …}

Texts, images and sounds go through the tokenizers, processors and pipelines of transformers. Texts
are embedded by the rule of sentence-transformers, from the files of its modules. Nothing of
this package prepares an input here or turns an output into an answer, and each input runs alone: an
answer must not depend on the inputs beside it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers.pipelines import PIPELINE_REGISTRY

from enginery.core.errors import InputError, raise_system_error
from enginery.core.model.files import SentenceBertConfig
from enginery.runtime.pytorch.side_files import load_pillow_processor
from enginery.runtime.pytorch.tokenizer import load_tokenizer

Item = Mapping[str, Any]
"""A raw input: `text`, with `text_pair` for a pair; `question` and `context`; `image`, uint8
(height, width, channels), with `labels` to choose from; or `raw`, float32 (samples,), with
`sampling_rate`, in hertz, and for CTC models `chunk_length_s`, the seconds of the chunks that it is
cut into. `{mask}` in a text stands for the tokenizer's mask token."""
Arrays = dict[str, NDArray[Any]]

_LOGITS = ("logits", "start_logits", "end_logits", "logits_per_image")
_TOP_ANSWERS, _TOP_FILLINGS = 3, 5
_MARGINS = 32
_PLANES = ("masks_queries_logits", "pred_masks")
_QUANTILES = 1000


@dataclass
class RawAnswer:
    """What the reference answers to one input."""

    answer: Any = None
    """Scores by label; spans with their scores; a text; None for arrays."""
    arrays: Arrays = field(default_factory=dict)
    """The vector, or the model's outputs by name."""
    problem: str = ""
    """Reason if the reference rejects the input."""
    scale: float = 0.0
    """Largest magnitude of the logits."""
    margins: list[float] = field(default_factory=list)
    """The smallest differences of the best two logits of a token or a frame, smallest first; of the
    planes of a segmentation the quantiles of all."""


class TorchAnswers:
    """A loaded model with its own tokenizer and processors in transformers."""

    def __init__(
        self,
        model: Any,
        path: Path,
        run_model: Callable[[dict[str, Any]], dict[str, Any]],
        *,
        restore: Callable[[], object],
        trust_remote_code: bool = False,
    ) -> None:
        """Take the model.

        Args:
            model: the model in PyTorch.
            path: its directory.
            run_model: runs the model on tensors; returns its outputs by the graph's names.
            restore: undoes what an earlier input changed in the model.
            trust_remote_code: run Python code that comes with the model.
        """
        self._model, self._path, self._run_model = model, path, run_model
        self._restore = restore
        self._options = {"trust_remote_code": trust_remote_code, "local_files_only": True}

    def __call__(self, kind: str, items: Sequence[Item]) -> list[RawAnswer]:
        """Answer each input alone.

        Args:
            kind: the task's verb, `embed_both` for texts and images in one space, or `tensors` for
                the model's outputs.
            items: the inputs.

        Raises:
            InputError: transformers cannot load the tokenizer or a processor, or nothing answers
                such inputs.
        """
        try:
            answer = self._answerer(kind)
        except InputError:
            raise
        except Exception as error:  # bad files can cause any error, anywhere in transformers
            raise InputError(first_line(error)) from error
        return [self._answer(answer, item) for item in items]

    def _answer(self, answer: Callable[[Item], RawAnswer], item: Item) -> RawAnswer:
        self._restore()
        try:
            with torch.inference_mode(), self._watched() as logits:
                result = answer(item)
        except Exception as error:  # an input may be wrong for a model in any way
            raise_system_error(error)
            return RawAnswer(problem=first_line(error))
        result.scale, result.margins = logits.scale, logits.margins
        return result

    def _answerer(self, kind: str) -> Callable[[Item], RawAnswer]:
        """Return the function that answers an input."""
        pipelines = {
            "classify": self._classify_texts,
            "tag": self._tag,
            "answer": self._answer_questions,
            "fill": self._fill,
            "classify_images": self._classify_media,
            "classify_audio": self._classify_media,
            "detect": self._detect,
            "segment": self._segment,
            "zero_shot_images": self._choose_labels,
            "transcribe": self._transcribe,
            "embed_both": self._embed_both,
        }
        if kind in pipelines:
            return pipelines[kind]()
        if kind == "embed":
            return SentenceRule(self._model, self._path, self._options)
        return self._run_tensors

    # -- pipelines ----------------------------------------------------------------------------

    def _pipeline(self, task: str, *parts: str, **options: Any) -> Any:
        loaded = {part: getattr(self, part) for part in parts}
        return transformers.pipeline(
            task, model=self._model, device=self._model.device, **loaded, **options
        )

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return load_tokenizer(self._path, **self._options)

    @cached_property
    def image_processor(self) -> Any:
        """The model's image processor, which computes with Pillow."""
        return load_pillow_processor(self._path, **self._options)

    @cached_property
    def feature_extractor(self) -> Any:
        """The model's feature extractor for sounds."""
        return transformers.AutoFeatureExtractor.from_pretrained(str(self._path), **self._options)

    def _classify_texts(self) -> Callable[[Item], RawAnswer]:
        pipeline = self._pipeline("text-classification", "tokenizer", top_k=None, truncation=True)

        def classify(item: Item) -> RawAnswer:
            # A list, because the pipeline wraps the results of a single text otherwise.
            return RawAnswer(_scores(pipeline([dict(item)])[0]))

        return classify

    def _tag(self) -> Callable[[Item], RawAnswer]:
        pipeline = self._pipeline(
            "token-classification", "tokenizer", aggregation_strategy="simple"
        )

        def tag(item: Item) -> RawAnswer:
            spans = pipeline(item["text"])
            return RawAnswer(
                [
                    [span["entity_group"], span["start"], span["end"], float(span["score"])]
                    for span in spans
                ]
            )

        return tag

    def _answer_questions(self) -> Callable[[Item], RawAnswer]:
        version = transformers.__version__
        if "question-answering" not in PIPELINE_REGISTRY.get_supported_tasks():
            raise InputError(f"transformers {version} has no pipeline that answers questions.")
        pipeline = self._pipeline("question-answering", "tokenizer", top_k=_TOP_ANSWERS)

        def answer(item: Item) -> RawAnswer:
            answers = pipeline(question=item["question"], context=item["context"])
            answers = answers if isinstance(answers, list) else [answers]
            return RawAnswer({f"{a['start']}–{a['end']}": float(a["score"]) for a in answers})

        return answer

    def _fill(self) -> Callable[[Item], RawAnswer]:
        pipeline = self._pipeline("fill-mask", "tokenizer", top_k=_TOP_FILLINGS)

        def fill(item: Item) -> RawAnswer:
            masks = pipeline(item["text"].replace("{mask}", self.tokenizer.mask_token))
            masks = masks if isinstance(masks[0], list) else [masks]
            return RawAnswer(
                [{str(token["token"]): float(token["score"]) for token in mask} for mask in masks]
            )

        return fill

    def _classify_media(self) -> Callable[[Item], RawAnswer]:
        labels = self._model.config.num_labels

        def classify(item: Item) -> RawAnswer:
            if "image" in item:
                return RawAnswer(_scores(pipeline(_image(item))))
            return RawAnswer(_scores(pipeline(dict(item))))

        if self._model.main_input_name == "pixel_values":
            pipeline = self._pipeline("image-classification", "image_processor", top_k=labels)
        else:
            pipeline = self._pipeline("audio-classification", "feature_extractor", top_k=labels)
        return classify

    def _detect(self) -> Callable[[Item], RawAnswer]:
        pipeline = self._pipeline("object-detection", "image_processor")
        # All of them: what the default threshold drops would be compared with nothing.
        return lambda item: RawAnswer({"objects": pipeline(_image(item), threshold=0.0)})

    def _choose_labels(self) -> Callable[[Item], RawAnswer]:
        pipeline = self._pipeline("zero-shot-image-classification", "tokenizer", "image_processor")
        return lambda item: RawAnswer(
            _scores(pipeline(_image(item), candidate_labels=list(item["labels"])))
        )

    def _segment(self) -> Callable[[Item], RawAnswer]:
        pipeline = self._pipeline("image-segmentation", "image_processor")
        # Every query that is the best one somewhere, whatever its score.
        options = {"threshold": 0.0, "mask_threshold": 0.0, "overlap_mask_area_threshold": 0.0}

        def segment(item: Item) -> RawAnswer:
            segments = pipeline(_image(item), **options)
            masks = [np.asarray(segment["mask"]) > 0 for segment in segments]
            size = item["image"].shape[:2]
            stacked = np.stack(masks) if masks else np.zeros((0, *size), dtype=bool)
            labels = [[segment["label"], segment["score"]] for segment in segments]
            return RawAnswer(labels, {"masks": stacked})

        return segment

    def _transcribe(self) -> Callable[[Item], RawAnswer]:
        pipeline = self._pipeline("automatic-speech-recognition", "tokenizer", "feature_extractor")

        def transcribe(item: Item) -> RawAnswer:
            sound, chunks = dict(item), item.get("chunk_length_s")
            sound.pop("chunk_length_s", None)
            return RawAnswer(pipeline(sound, chunk_length_s=chunks)["text"])

        return transcribe

    # -- the model's outputs, and the inputs of `generate` --------------------------------------

    def _embed_both(self) -> Callable[[Item], RawAnswer]:
        positions = self._model.config.get_text_config().max_position_embeddings
        longest = min(positions, self.tokenizer.model_max_length)
        options: dict[str, Any] = {"truncation": True, "max_length": longest}
        if "siglip" in self._model.config.model_type:
            # It was trained on texts of one length, and its tokenizers give no mask.
            options |= {"padding": "max_length", "return_attention_mask": False}

        def embed(item: Item) -> RawAnswer:
            if "image" in item:
                features = self._model.get_image_features(**self.prepare(item))
            else:
                tokens = self.tokenizer(item["text"], return_tensors="pt", **options)
                taken = inspect.signature(self._model.get_text_features).parameters
                tokens = {name: value for name, value in tokens.items() if name in taken}
                features = self._model.get_text_features(**tokens)
            # transformers 5 returns all outputs of the tower.
            features = getattr(features, "pooler_output", features)
            vector = torch.nn.functional.normalize(features, p=2, dim=-1)[0]
            return RawAnswer(arrays={"vector": _array(vector)})

        return embed

    def _run_tensors(self, item: Item) -> RawAnswer:
        # A cache is no output of a graph.
        outputs = {
            n: v for n, v in self._run_model(self.prepare(item)).items() if torch.is_tensor(v)
        }
        return RawAnswer(arrays={name: _array(value) for name, value in outputs.items()})

    def prepare(self, item: Item) -> dict[str, Any]:
        """Return the model's inputs for a raw input, as tensors with a batch of one."""
        if "image" in item:
            return dict(self.image_processor(images=_image(item), return_tensors="pt"))
        if "raw" in item:
            sound = self.feature_extractor(
                item["raw"], sampling_rate=item["sampling_rate"], return_tensors="pt"
            )
            return dict(sound)
        texts = [item[key] for key in ("text", "text_pair") if key in item]
        return dict(self.tokenizer(*texts, truncation=True, return_tensors="pt"))

    @contextmanager
    def _watched(self) -> Iterator[_Logits]:
        """Note the logits of every run of the model."""
        logits = _Logits()
        hook = self._model.register_forward_hook(lambda _module, _inputs, out: logits.note(out))
        try:
            yield logits
        finally:
            hook.remove()


@dataclass
class _Logits:
    """What is known of the logits of one or more runs."""

    scale: float = 0.0
    margins: list[float] = field(default_factory=list)

    def note(self, outputs: Any) -> None:
        if not isinstance(outputs, Mapping):
            return
        for name in _LOGITS:
            values: Any = outputs.get(name)
            if not torch.is_tensor(values) or not values.numel():
                continue
            self.scale = max(self.scale, float(values.abs().max()))
            if values.ndim == 4:
                self._note_planes(values)
            elif values.shape[-1] > 1:
                best = values.topk(2, dim=-1).values
                gaps = (best[..., 0] - best[..., 1]).flatten().tolist()
                self.margins = sorted([*self.margins, *gaps])[:_MARGINS]
        for name in _PLANES:
            if torch.is_tensor(planes := outputs.get(name)):
                self._note_planes(planes)

    def _note_planes(self, planes: Any) -> None:
        """Note the margins of the best plane at each pixel: planes (batch, planes, …)."""
        self.scale = max(self.scale, float(planes.abs().max()))
        if planes.shape[1] > 1:
            best = planes.float().topk(2, dim=1).values
            gaps = (best[:, 0] - best[:, 1]).flatten().sort().values
            steps = torch.linspace(0, len(gaps) - 1, min(_QUANTILES, len(gaps)))
            self.margins = gaps[steps.long()].tolist()


class SentenceRule:
    """sentence-transformers' rule for one text: its modules, read from their files.

    Source: `SentenceTransformer.encode` and the modules Transformer, Pooling, Dense, LayerNorm and
    Normalize of sentence-transformers 5.7 and 6.2.
    """

    def __init__(self, model: Any, path: Path, options: Mapping[str, Any]) -> None:
        """Read the modules.

        Raises:
            InputError: there is a module whose rule is not known here.
        """
        self._model = model
        modules = _read(path / "modules.json") or [
            {"type": "Transformer", "path": ""},
            {"type": "Pooling", "path": ""},
        ]
        self._is_plain = not (path / "modules.json").is_file()
        settings = _read(path / "config_sentence_transformers.json") or {}
        self._truncate_dim = settings.get("truncate_dim")
        name = settings.get("default_prompt_name")
        self._prompt: str = (settings.get("prompts") or {}).get(name) or "" if name else ""
        self._steps: list[Callable[[dict[str, Any]], Any]] = []
        config: dict[str, Any] = {}
        for module in modules:
            kind, folder = module["type"].rpartition(".")[2], path / module["path"]
            if kind == "Transformer":
                documents = (_read(folder / name) for name in SentenceBertConfig.FILES)
                config = next(filter(None, documents), {})
            elif self._is_plain:
                self._steps.append(_Pooling({"pooling_mode": _plain_mode(model.config)}))
            else:
                self._steps.append(_sentence_module(kind, folder))
        limit = config.get("max_seq_length")
        lengths = {} if limit is None else {"model_max_length": limit}
        self._tokenizer = load_tokenizer(path, **lengths, **options)
        positions = getattr(model.config, "max_position_embeddings", None)
        if limit is None and positions is not None:
            limit = min(positions, self._tokenizer.model_max_length)
        self._limit, self._lower = limit, bool(config.get("do_lower_case"))

    def __call__(self, item: Item) -> RawAnswer:
        """Embed a text."""
        features = self._tokenize(self._prompt + item["text"])
        if self._prompt:
            prompt = self._tokenize(self._prompt)["input_ids"][0]
            ends_special = int(prompt[-1]) in self._tokenizer.all_special_ids
            features["prompt_length"] = len(prompt) - ends_special
        parameters = inspect.signature(self._model.forward).parameters
        taken = {name: value for name, value in features.items() if name in parameters}
        outputs = self._model(**taken, return_dict=True)
        own = _own_vector(outputs, self._model.config) if self._is_plain else None
        if own is not None:
            return RawAnswer(arrays={"vector": _array(own[0])})
        features["token_embeddings"] = outputs[0]
        for step in self._steps:
            features["sentence_embedding"] = step(features)
        vector = features["sentence_embedding"][0][: self._truncate_dim]
        return RawAnswer(arrays={"vector": _array(vector)})

    def _tokenize(self, text: str) -> dict[str, Any]:
        # A single text needs no padding, for which not every tokenizer has a token.
        return dict(
            self._tokenizer(
                [text.lower() if self._lower else text],
                truncation="longest_first",
                max_length=self._limit,
                return_tensors="pt",
            )
        )


def _plain_mode(config: Any) -> str:
    """Return the pooling of a model without modules.json, as `SentenceTransformer` chooses it."""
    is_decoder = (config.architectures or [""])[0].endswith("ForCausalLM")
    return "lasttoken" if is_decoder and getattr(config, "is_causal", True) else "mean"


def _own_vector(outputs: Mapping[str, Any], config: Any) -> Any | None:
    """Return the vectors of an encoder that makes them itself: CLIP's towers, DPR's encoders."""
    if "text_embeds" in outputs:
        return outputs["text_embeds"]
    is_tower = config.model_type.endswith("_text_model")
    return outputs.get("pooler_output") if is_tower or "last_hidden_state" not in outputs else None


def _sentence_module(kind: str, folder: Path) -> Callable[[dict[str, Any]], Any]:
    """Return a module after the transformer: from the features of a text to its vector."""
    if kind == "Pooling":
        return _Pooling(_read(folder / "config.json") or {})
    if kind == "Normalize":
        return lambda features: torch.nn.functional.normalize(
            features["sentence_embedding"], p=2, dim=1
        )
    if kind == "Dropout":
        return lambda features: features["sentence_embedding"]
    if kind in ("Dense", "LayerNorm"):
        layer = _load_layer(kind, _read(folder / "config.json") or {}, folder)
        return lambda features: layer(features["sentence_embedding"])
    raise InputError(f"the rule of sentence-transformers' module {kind} is not known here.")


def _load_layer(kind: str, config: Mapping[str, Any], folder: Path) -> Any:
    """Return a trained layer of sentence-transformers."""
    file = folder / "model.safetensors"
    if file.is_file():
        from safetensors.torch import load_file

        weights = load_file(file)
    else:
        weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    if kind == "LayerNorm":
        norm = torch.nn.LayerNorm(config["dimension"])
        norm.load_state_dict({name.removeprefix("norm."): w for name, w in weights.items()})
        return norm.eval()
    linear = torch.nn.Linear(
        config["in_features"], config["out_features"], bias=config.get("bias", True)
    )
    linear.load_state_dict({name.removeprefix("linear."): w for name, w in weights.items()})
    # Only PyTorch's own functions: the name comes from the model's file.
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    activation = getattr(torch.nn.modules.activation, name, None) or getattr(torch.nn, name)
    return torch.nn.Sequential(linear, activation()).eval()


@dataclass(frozen=True)
class _Pooling:
    """sentence-transformers' pooling of the token vectors of one text, which has no padding."""

    config: Mapping[str, Any]

    def __call__(self, features: dict[str, Any]) -> Any:
        tokens = features["token_embeddings"]
        mask = features.get("attention_mask", torch.ones(tokens.shape[:2], dtype=torch.int64))
        if not self.config.get("include_prompt", True):
            mask = mask.clone()
            mask[:, : features.get("prompt_length", 0)] = 0
        first = int(mask[0].argmax())
        weights = mask[..., None].to(tokens.dtype)
        total, count = (tokens * weights).sum(1), weights.sum(1).clamp(min=1e-9)
        positions = torch.arange(1, tokens.shape[1] + 1)[None, :, None] * weights
        last = int(mask[0].nonzero()[-1]) if mask.any() else 0
        vectors = {
            "cls": tokens[:, first],
            "max": tokens.masked_fill(weights == 0, -1e9).max(1).values,
            "mean": total / count,
            "mean_sqrt_len_tokens": total / count.sqrt(),
            "weightedmean": (tokens * positions).sum(1) / positions.sum(1).clamp(min=1e-9),
            "lasttoken": (tokens * weights)[:, last],
        }
        return torch.cat([vectors[mode] for mode in self._modes], dim=1)

    @property
    def _modes(self) -> list[str]:
        # Version 6 names the modes; earlier ones have a switch for each, in this order.
        if named := self.config.get("pooling_mode"):
            return [named] if isinstance(named, str) else list(named)
        switches = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens"}
        switches["mean_sqrt_len_tokens"] = "mean_sqrt_len_tokens"
        switches |= {"weightedmean": "weightedmean_tokens", "lasttoken": "lasttoken"}
        on = [m for m, key in switches.items() if self.config.get(f"pooling_mode_{key}")]
        return on or ["mean"]


def _scores(results: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the labels of a pipeline with their scores; several labels may have one name."""
    return [[result["label"], float(result["score"])] for result in results]


def _image(item: Item) -> Any:
    from PIL import Image

    return Image.fromarray(item["image"])


def _array(value: Any) -> NDArray[Any]:
    return np.asarray(value.detach().cpu().float().numpy() if torch.is_tensor(value) else value)


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class without a message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
