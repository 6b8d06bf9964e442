"""What is derived from the type of a result: columns, tensors, JSON, signatures."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest

from enginery.cli.demo import describe_results
from enginery.deploy.triton.models import _task_outputs
from enginery.deploy.triton.text_format import config_text
from enginery.predict.columns import OutputColumns
from enginery.runtime.tasks import TASKS
from enginery.runtime.tasks.answer import ContextAnswer
from enginery.runtime.tasks.audio import Transcription
from enginery.runtime.tasks.classify import Classification, Label
from enginery.runtime.tasks.detect import Box, Detection
from enginery.runtime.tasks.fill import Filling, MaskFillings
from enginery.runtime.tasks.generate import Generate, GenerateOptions, Generation
from enginery.runtime.tasks.results import is_finite, output_tensors, to_plain
from enginery.runtime.tasks.segment import Segment, make_segment
from enginery.runtime.tasks.tag import TokenSpan
from enginery.serve.api.endpoints import json_response
from enginery.serve.api.oip_tensors import task_metadata, tensors_from_results

LABELS = [
    Classification((Label("glad", 0.75), Label("müde", 0.25))),
    Classification((Label("müde", 0.5), Label("glad", 0.5))),
]
LABELLED = ("classify", "classify_images", "zero_shot_images", "classify_audio")
"""Tasks whose results are labels."""
SMALL = Box(-1, 0, 5, 6)
MASK = make_segment("", None, np.array([[True, True, True, False]])).mask
RESULTS: dict[str, list[Any]] = {
    "embed": [np.array([0.5, -1.0], np.float32), np.array([0.0, 2.0], np.float32)],
    "embed_images": [np.array([0.5, -1.0], np.float32)],
    **dict.fromkeys(LABELLED, LABELS),
    "tag": [[TokenSpan("PER", 0.5, 0, 3, "Ada"), TokenSpan("LOC", 0.25, 13, 19, "London")], []],
    "answer": [
        [ContextAnswer("London", 0.75, 13, 19), ContextAnswer("Ada", 0.25, 0, 3)],
        [ContextAnswer("", 0.5, 0, 0)],
    ],
    "fill": [
        MaskFillings(
            (
                (Filling("warm", 7, 0.5, "it is warm"), Filling("cöld", 8, 0.25, "it is cöld")),
                (Filling("on", 9, 0.125, "it is on"),),
            )
        )
    ],
    "detect": [[Detection("cat", 0.75, Box(1, 2, 30, 40)), Detection("ox", 0.5, SMALL)], []],
    "segment": [[Segment("sky", None, MASK), Segment("car", 0.5, MASK)], []],
    "transcribe": [Transcription("it is warm", 0.5), Transcription("", 0.25)],
}
"""A made-up result for each task."""

LABEL_JSON = [
    '{"labels":[{"label":"glad","score":0.75},{"label":"müde","score":0.25}]}',
    '{"labels":[{"label":"müde","score":0.5},{"label":"glad","score":0.5}]}',
]
JSON: dict[str, list[str]] = {
    "embed": ["[0.5,-1.0]", "[0.0,2.0]"],
    "embed_images": ["[0.5,-1.0]"],
    **dict.fromkeys(LABELLED, LABEL_JSON),
    "tag": [
        '[{"label":"PER","score":0.5,"start":0,"end":3,"text":"Ada"},'
        '{"label":"LOC","score":0.25,"start":13,"end":19,"text":"London"}]',
        "[]",
    ],
    "answer": [
        '[{"text":"London","score":0.75,"start":13,"end":19},'
        '{"text":"Ada","score":0.25,"start":0,"end":3}]',
        '[{"text":"","score":0.5,"start":0,"end":0}]',
    ],
    "fill": [
        '{"masks":[[{"token":"warm","token_id":7,"score":0.5,"sequence":"it is warm"},'
        '{"token":"cöld","token_id":8,"score":0.25,"sequence":"it is cöld"}],'
        '[{"token":"on","token_id":9,"score":0.125,"sequence":"it is on"}]]}'
    ],
    "detect": [
        '[{"label":"cat","score":0.75,"box":{"xmin":1,"ymin":2,"xmax":30,"ymax":40}},'
        '{"label":"ox","score":0.5,"box":{"xmin":-1,"ymin":0,"xmax":5,"ymax":6}}]',
        "[]",
    ],
    "segment": [
        f'[{{"label":"sky","score":null,"mask":"{MASK}"}},'
        f'{{"label":"car","score":0.5,"mask":"{MASK}"}}]',
        "[]",
    ],
    "transcribe": ['{"text":"it is warm","score":0.5}', '{"text":"","score":0.25}'],
}

RANKED = ["label: string", "score: float"]
LABEL_COLUMNS = {0: [*RANKED, "scores: list<item: struct<label: string, score: float>>"], 1: RANKED}
ANSWER_COLUMNS = ["answer: string", "score: float", "start: int64", "end: int64"]
COLUMNS: dict[tuple[str, int], list[str]] = {
    ("embed", 0): ["embedding: fixed_size_list<item: float>[2]"],
    ("embed_images", 0): ["embedding: fixed_size_list<item: float>[2]"],
    **{(verb, top_k): columns for verb in LABELLED for top_k, columns in LABEL_COLUMNS.items()},
    ("tag", 0): [
        "spans: list<item: struct<label: string, score: float, start: int64, end: int64, "
        "text: string>>"
    ],
    ("answer", 1): ANSWER_COLUMNS,
    ("answer", 2): [
        *ANSWER_COLUMNS,
        "answers: list<item: struct<text: string, score: float, start: int64, end: int64>>",
    ],
    ("fill", 1): [
        "masks: list<item: list<item: struct<token: string, token_id: int64, score: float, "
        "sequence: string>>>"
    ],
    ("detect", 0): [
        "detections: list<item: struct<label: string, score: float, box: struct<xmin: int64, "
        "ymin: int64, xmax: int64, ymax: int64>>>"
    ],
    ("segment", 0): ["segments: list<item: struct<label: string, score: float, mask: string>>"],
    ("transcribe", 0): ["text: string", "score: float"],
}
"""Verb and `top_k`, 0 if it is left out -> columns of a table."""

ANSWER_ROWS = [
    {"answer": "London", "score": 0.75, "start": 13, "end": 19},
    {"answer": "", "score": 0.5, "start": 0, "end": 0},
]
FIRST_LABELS = [{"label": "glad", "score": 0.75}, {"label": "müde", "score": 0.5}]
PLAIN = {verb: [orjson.loads(text) for text in texts] for verb, texts in JSON.items()}
LABEL_ROWS = [
    {**first, "scores": each["labels"]}
    for first, each in zip(FIRST_LABELS, PLAIN["classify"], strict=True)
]
ROWS: dict[tuple[str, int], list[dict[str, Any]]] = {
    ("embed", 0): [{"embedding": vector} for vector in PLAIN["embed"]],
    ("embed_images", 0): [{"embedding": vector} for vector in PLAIN["embed_images"]],
    **{(verb, 0): LABEL_ROWS for verb in LABELLED},
    **{(verb, 1): FIRST_LABELS for verb in LABELLED},
    ("tag", 0): [{"spans": spans} for spans in PLAIN["tag"]],
    ("answer", 1): ANSWER_ROWS,
    ("answer", 2): [
        {**first, "answers": answers}
        for first, answers in zip(ANSWER_ROWS, PLAIN["answer"], strict=True)
    ],
    ("fill", 1): PLAIN["fill"],
    ("detect", 0): [{"detections": boxes} for boxes in PLAIN["detect"]],
    ("segment", 0): [{"segments": segments} for segments in PLAIN["segment"]],
    ("transcribe", 0): PLAIN["transcribe"],
}

LABEL_OUTPUTS = [("label", "BYTES", [-1, -1]), ("score", "FP32", [-1, -1])]
OUTPUTS: dict[str, list[tuple[str, str, list[int]]]] = {
    "embed": [("embedding", "FP32", [-1, 2])],
    "embed_images": [("embedding", "FP32", [-1, 2])],
    **dict.fromkeys(LABELLED, LABEL_OUTPUTS),
    "tag": [("entities", "BYTES", [-1])],
    "answer": [
        ("answer", "BYTES", [-1, -1]),
        ("score", "FP32", [-1, -1]),
        ("start", "INT64", [-1, -1]),
        ("end", "INT64", [-1, -1]),
    ],
    "fill": [("fillings", "BYTES", [-1])],
    "detect": [("detections", "BYTES", [-1])],
    "segment": [("segments", "BYTES", [-1])],
    "transcribe": [("text", "BYTES", [-1]), ("score", "FP32", [-1])],
}
"""Verb -> name, datatype and shape of each tensor, as the Open Inference Protocol declares them."""


def json_bytes(verb: str) -> list[bytes]:
    """Return the results' JSON with the spaces that Python's module puts in."""
    return [json.dumps(result, ensure_ascii=False).encode() for result in PLAIN[verb]]


LABEL_TENSORS = [
    ("label", "BYTES", (2, 2), [b"glad", "müde".encode(), "müde".encode(), b"glad"]),
    ("score", "FP32", (2, 2), [0.75, 0.25, 0.5, 0.5]),
]
TENSORS: dict[str, list[tuple[str, str, tuple[int, ...], list[Any]]]] = {
    "embed": [("embedding", "FP32", (2, 2), [0.5, -1.0, 0.0, 2.0])],
    "embed_images": [("embedding", "FP32", (1, 2), [0.5, -1.0])],
    **dict.fromkeys(LABELLED, LABEL_TENSORS),
    "tag": [("entities", "BYTES", (2,), json_bytes("tag"))],
    "answer": [
        ("answer", "BYTES", (2, 2), [b"London", b"Ada", b"", b""]),
        ("score", "FP32", (2, 2), [0.75, 0.25, 0.5, 0.0]),
        ("start", "INT64", (2, 2), [13, 0, 0, 0]),
        ("end", "INT64", (2, 2), [19, 3, 0, 0]),
    ],
    "fill": [("fillings", "BYTES", (1,), json_bytes("fill"))],
    "detect": [("detections", "BYTES", (2,), json_bytes("detect"))],
    "segment": [("segments", "BYTES", (2,), json_bytes("segment"))],
    "transcribe": [
        ("text", "BYTES", (2,), [b"it is warm", b""]),
        ("score", "FP32", (2,), [0.5, 0.25]),
    ],
}

LABEL_WORDS = [
    ({"answer": "glad 0.75, müde 0.25"}, '{"labels":'),
    ({"answer": "müde 0.50, glad 0.50"}, '{"labels":'),
]
WORDS: dict[str, list[tuple[dict[str, str], str]]] = {
    "embed": [
        ({"embedding": "2 dims", "nearest": "b", "cosine": "-0.894"}, '{"dims":2,"nearest":"b",'),
        ({"embedding": "2 dims", "nearest": "a", "cosine": "-0.894"}, '{"dims":2,"nearest":"a",'),
    ],
    "embed_images": [({"embedding": "2 dims"}, '{"dims":2}')],
    **dict.fromkeys(LABELLED, LABEL_WORDS),
    "tag": [
        ({"answer": "Ada (PER 0.50); London (LOC 0.25)"}, '{"spans":[{"label":"PER"'),
        ({"answer": "nothing found"}, '{"spans":[]}'),
    ],
    "answer": [
        ({"answer": "London 0.75"}, '{"answers":[{"text":"London","score":0.75,'),
        ({"answer": "none 0.50"}, '{"answers":[{"text":"","score":0.5,"start":0,"end":0}]}'),
    ],
    "fill": [({"answer": "warm 0.50; cöld 0.25 | on 0.12"}, '{"masks":[[{"token":"warm",')],
    "segment": [
        ({"answer": "sky on 75%, car 0.50 on 75%"}, '{"segments":[{"label":"sky",'),
        ({"answer": "nothing found"}, '{"segments":[]}'),
    ],
    "detect": [
        (
            {"answer": "cat 0.75 at (1, 2, 30, 40), ox 0.50 at (-1, 0, 5, 6)"},
            '{"detections":[{"label":"cat",',
        ),
        ({"answer": "nothing found"}, '{"detections":[]}'),
    ],
    "transcribe": [
        ({"answer": "it is warm"}, '{"text":"it is warm","score":0.5}'),
        ({"answer": ""}, '{"text":"","score":0.25}'),
    ],
}
"""Verb -> each result as words for people, and how its JSON for programs begins."""

LABEL_SIGNATURE = (
    '[{"type": "array", "items": {"type": "object", "properties": {"label": {"type": "string", '
    '"required": true}, "score": {"type": "double", "required": true}}}, "name": "labels", '
    '"required": true}]'
)
VECTOR_SIGNATURE = '[{"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, -1]}}]'
SIGNATURES = {
    "embed": VECTOR_SIGNATURE,
    "embed_images": VECTOR_SIGNATURE,
    **dict.fromkeys(("classify", "classify_images", "classify_audio"), LABEL_SIGNATURE),
    "tag": '[{"type": "array", "items": {"type": "object", "properties": {"end": {"type": "long", '
    '"required": true}, "label": {"type": "string", "required": true}, "score": {"type": "double", '
    '"required": true}, "start": {"type": "long", "required": true}, "text": {"type": "string", '
    '"required": true}}}, "required": true}]',
    "answer": '[{"type": "array", "items": {"type": "object", "properties": {"end": '
    '{"type": "long", "required": true}, "score": {"type": "double", "required": true}, "start": '
    '{"type": "long", "required": true}, "text": {"type": "string", "required": true}}}, '
    '"required": true}]',
    "fill": '[{"type": "array", "items": {"type": "array", "items": {"type": "object", '
    '"properties": {"score": {"type": "double", "required": true}, "sequence": {"type": "string", '
    '"required": true}, "token": {"type": "string", "required": true}, "token_id": {"type": "long",'
    ' "required": true}}}}, "name": "masks", "required": true}]',
    "detect": '[{"type": "array", "items": {"type": "object", "properties": {"box": {"type": '
    '"object", "properties": {"xmax": {"type": "long", "required": true}, "xmin": {"type": "long", '
    '"required": true}, "ymax": {"type": "long", "required": true}, "ymin": {"type": "long", '
    '"required": true}}, "required": true}, "label": {"type": "string", "required": true}, '
    '"score": {"type": "double", "required": true}}}, "required": true}]',
    "segment": '[{"type": "array", "items": {"type": "object", "properties": {"label": {"type": '
    '"string", "required": true}, "mask": {"type": "string", "required": true}, "score": {"type": '
    '"double", "required": false}}}, "required": true}]',
    "transcribe": '[{"type": "string", "name": "text", "required": true}, '
    '{"type": "double", "name": "score", "required": true}]',
}
"""Verb -> outputs of MLflow's signature, which labels to choose from are no part of."""


def columns_of(verb: str, top_k: int) -> OutputColumns:
    task = TASKS[verb]
    options = task.Options.read({"top_k": top_k} if top_k else {})
    return OutputColumns.of(task, options, pa.schema({}), (), prefix="", dim=2)


def rows_of(columns: OutputColumns, results: list[Any]) -> list[dict[str, Any]]:
    """Return the rows of a table of results, without their column of errors."""
    kept = pa.RecordBatch.from_arrays([], schema=pa.schema({}))
    return [
        {name: value for name, value in row.items() if name != "error"}
        for row in columns.batch(kept, results, {}).to_pylist()
    ]


def test_every_task_has_made_up_results():
    # Generated texts have columns, but no tensors and no signature of MLflow.
    assert set(RESULTS) == set(TASKS) - {"generate"}


@pytest.mark.parametrize(("verb", "top_k"), COLUMNS)
def test_columns_of_a_table(verb, top_k):
    columns = columns_of(verb, top_k)
    shown = [f"{field.name}: {field.type}" for field in columns.schema]
    assert shown == [*COLUMNS[verb, top_k], "error: string"]
    assert rows_of(columns, RESULTS[verb]) == ROWS[verb, top_k]


def test_a_row_without_a_result_has_nulls():
    columns = columns_of("answer", 2)
    found = rows_of(columns, [None, RESULTS["answer"][1]])
    assert found == [dict.fromkeys(found[0]), ROWS["answer", 2][1]]


def test_vectors_of_one_array_are_a_column():
    assert rows_of(columns_of("embed", 0), np.stack(RESULTS["embed"])) == ROWS["embed", 0]


@pytest.mark.parametrize("count", [1, 2])
def test_columns_of_generated_texts(count):
    options = GenerateOptions.read({"num_return_sequences": count})
    columns = OutputColumns.of(Generate, options, pa.schema({}), (), prefix="", dim=0)
    kinds = {"generated": "string", "finish": "string", "score": "float"}
    if count > 1:
        kinds = {name: f"list<item: {kind}>" for name, kind in kinds.items()}
    types = {field.name: str(field.type) for field in columns.schema}
    assert types == {**kinds, "error": "string"}
    texts = [Generation("warm", (1, 2), "stop", None), Generation("cold", (3,), "length", -0.5)]
    expected = {
        1: [{"generated": "warm", "finish": "stop", "score": None}],
        2: [{"generated": ["warm", "cold"], "finish": ["stop", "length"], "score": [None, -0.5]}],
    }
    assert rows_of(columns, [texts[:count]]) == expected[count]


@pytest.mark.parametrize("verb", RESULTS)
def test_tensors_of_the_open_inference_protocol(verb):
    _, outputs = task_metadata(TASKS[verb], 2 if verb.startswith("embed") else 0)
    assert outputs == [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"of": "task"}}
        for name, datatype, shape in OUTPUTS[verb]
    ]
    tensors = tensors_from_results(TASKS[verb], RESULTS[verb])
    assert [
        (tensor.name, tensor.datatype, tensor.shape, np.asarray(tensor.values).ravel().tolist())
        for tensor in tensors
    ] == TENSORS[verb]


@pytest.mark.parametrize("verb", RESULTS)
def test_tensors_of_triton(verb):
    types = {"BYTES": "TYPE_STRING", "FP32": "TYPE_FP32", "INT64": "TYPE_INT64"}
    expected = [
        {"name": name, "data_type": types[datatype], "dims": [-1] * len(shape)}
        for name, datatype, shape in OUTPUTS[verb]
    ]
    tensors = _task_outputs(TASKS[verb])
    found = [{**tensor, "data_type": str(tensor["data_type"])} for tensor in tensors]
    assert found == expected
    assert config_text({"output": tensors}).count("TYPE_") == len(expected)


@pytest.mark.parametrize("verb", RESULTS)
def test_json_of_the_server_and_of_mlflow(verb):
    for result, expected in zip(RESULTS[verb], JSON[verb], strict=True):
        assert json_response(result).body == expected.encode()
        if not isinstance(result, np.ndarray):
            assert orjson.dumps(to_plain(result)) == expected.encode()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow.*")
@pytest.mark.filterwarnings("ignore::FutureWarning:mlflow.*")
@pytest.mark.filterwarnings("ignore::UserWarning:mlflow.*")
@pytest.mark.parametrize("verb", SIGNATURES)
def test_signature_for_mlflow(verb):
    pytest.importorskip("mlflow", reason="pip install 'enginery[mlflow]'")
    from enginery.publish.targets.mlflow.model import signature

    task = TASKS[verb]
    graph_input = {"text": "input_ids", "image": "pixel_values", "audio": "input_values"}
    specs = [SimpleNamespace(name=graph_input[task.modality])]
    outputs = [
        SimpleNamespace(name=name, dims=("batch",) * rank)
        for name, rank in (task.graph_outputs or {"logits": 4}).items()
    ]
    manifest: Any = SimpleNamespace(
        task=task.tasks[0], graphs=[SimpleNamespace(inputs=specs, outputs=outputs)]
    )
    schema = signature(manifest)
    assert schema.outputs.to_json() == SIGNATURES[verb]
    kind = "string" if task.modality == "text" else "binary"
    assert [column["type"] for column in schema.inputs.to_dict()] == [kind] * len(task.inputs)


@pytest.mark.parametrize("verb", RESULTS)
def test_words_for_people(verb):
    inputs = list("ab")[: len(RESULTS[verb])]
    for (words, begins), described in zip(WORDS[verb], describe(verb, inputs), strict=True):
        assert described.words == words
        assert orjson.dumps(described.values).decode().startswith(begins)


NOT_FINITE_LABELS = [Classification((Label("glad", 0.5), Label("müde", math.nan)))]
NOT_FINITE: dict[str, list[Any]] = {
    "embed": [np.array([1, math.nan], np.float32), np.array([math.inf], np.float32)],
    "embed_images": [np.array([-math.inf, 0], np.float32)],
    **dict.fromkeys(LABELLED, NOT_FINITE_LABELS),
    "tag": [[TokenSpan("PER", 0.5, 0, 3, "Ada"), TokenSpan("PER", math.nan, 0, 3, "Ada")]],
    "answer": [[ContextAnswer("", math.nan, 0, 0)]],
    "fill": [MaskFillings(((), (Filling("warm", 7, math.inf, "it is warm"),)))],
    "detect": [[Detection("ox", math.nan, SMALL)]],
    "segment": [[Segment("sky", None, ""), Segment("car", math.nan, "")]],
    "transcribe": [Transcription("", math.nan)],
}


@pytest.mark.parametrize("verb", RESULTS)
def test_nan_and_infinity_are_noticed(verb):
    assert all(map(is_finite, RESULTS[verb]))
    assert not any(map(is_finite, NOT_FINITE[verb]))


def test_generated_texts_are_no_tensors_and_have_no_mlflow_signature():
    from enginery.publish.targets.mlflow.model import signature

    assert output_tensors(Generate.result_type) == ()
    manifest: Any = SimpleNamespace(task=Generate.tasks[0], graphs=[])
    assert signature(manifest) is None


def test_words_and_values_of_a_generated_text():
    texts = [Generation("warm", (1, 2), "stop", None, 3)]
    (sample,) = describe_results(object.__new__(Generate), ["The pump is"], texts)
    assert sample.words == {"answer": "warm"}
    assert sample.values["finish"] == "stop"


def test_score_of_a_generated_text_may_be_missing():
    assert is_finite([Generation("warm", (1,), "stop", None)])
    assert not is_finite([Generation("warm", (1,), "stop", math.nan)])


def describe(verb: str, inputs: list[str]) -> Any:
    """Describe the results by a task without the files of a model, which that does not need."""
    results = RESULTS[verb]
    if verb.startswith("embed"):
        results = np.stack(results)
    return describe_results(object.__new__(TASKS[verb]), inputs, results)
