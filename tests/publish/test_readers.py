"""The folder that `publish --layout hub` writes, opened by the tools that it is for.

Every reader embeds the built-in sentences with all-MiniLM-L6-v2. Its vectors are compared with
PyTorch's: in FP32 and FP16 each by its cosine, in INT8 their mean cosine with the limit that the
artifact's own `quantization.json` gives.

Optimum and ONNX Runtime are in this environment. The others are named by variables, see
CONTRIBUTING.md, and their tests are skipped without: SENTENCE_TRANSFORMERS_PYTHON and
FASTEMBED_PYTHON are the Python of an environment with that package, TRANSFORMERS_JS is a directory
where `npm install @huggingface/transformers` has run.
"""

import json
import os
import shutil
import subprocess

import numpy as np
import pytest

from enginery import (
    export_model,
    load_model,
    optimize_model,
    publish_model,
    pull_model,
    quantize_model,
    validate_model,
)
from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.model.source import resolve_source
from enginery.passes.ir.graph_file import read_graph, write_graph
from enginery.runtime.builtin_inputs import SENTENCES
from enginery.validate.metrics.budget import accuracy_expectation

pytestmark = pytest.mark.slow

MIN_COSINE = {"fp32": 0.9999, "fp16": 0.9999}
FILES = {"fp32": "model.onnx", "fp16": "model_fp16.onnx", "quantized": "model_quantized.onnx"}
TEXTS = list(SENTENCES)


@pytest.fixture(scope="module")
def artifacts(minilm, session_home, tmp_path_factory):
    """Return the model in FP32, FP16 and dynamic INT8, all validated."""
    root = tmp_path_factory.mktemp("artifacts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINERY_HOME", str(session_home))
        fp32 = export_model(minilm, out=root / "fp32")
        made = [
            fp32,
            optimize_model(fp32, precision="fp16", out=root / "fp16"),
            quantize_model(fp32, scheme="dynamic", target="cpu", out=root / "int8"),
        ]
        for artifact in made:
            assert validate_model(artifact).passed
    return [Artifact.open(artifact.path) for artifact in made]


@pytest.fixture(scope="module", params=["as exported", "external data"])
def folder(request, artifacts, tmp_path_factory):
    """Return the published folder: of graphs as they are, and of graphs that are rewritten."""
    root = tmp_path_factory.mktemp("published")
    rewritten = request.param != "as exported"
    if rewritten:
        artifacts = [with_external_data(a, root / a.name) for a in artifacts]
    publish_model(
        artifacts[0],
        str(root / "registry"),
        variants=artifacts[1:],
        layout="hub",
        allow_failed=rewritten,  # their content is not what was validated
        license="apache-2.0",
        name="minilm",
    )
    found = root / "registry/minilm/1"
    assert len(list(found.glob("onnx/*_data"))) == (3 if rewritten else 0)
    return found


def with_external_data(artifact, out):
    shutil.copytree(artifact.path, out)
    (out / "model.onnx").unlink()
    model = read_graph(artifact.path / "model.onnx")
    data = write_graph(model, out / "model.onnx", max_inline_bytes=0)
    graph = artifact.manifest.graphs[0].model_copy(update={"data_files": data})
    commit_artifact(out, artifact.manifest.model_copy(update={"graphs": (graph,)}))
    return Artifact.open(out)


@pytest.fixture(scope="module")
def expected(minilm):
    """Return PyTorch's embeddings: mean of the token vectors, normalized."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    source = resolve_source(minilm).path
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModel.from_pretrained(source)
    inputs = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        tokens = model.eval()(**inputs).last_hidden_state.numpy()
    return pooled(tokens, inputs["attention_mask"].numpy())


def pooled(tokens, mask):
    vectors = (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def agrees(artifacts, expected):
    """Return a function that fails unless a reader's vectors are PyTorch's, within the limits."""

    def check(variant, vectors):
        found = np.asarray(vectors, dtype=np.float64)
        assert found.shape == expected.shape
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-3)
        cosines = (found * expected).sum(axis=1)
        if variant in MIN_COSINE:
            assert cosines.min() >= MIN_COSINE[variant]
            return
        (artifact,) = [a for a in artifacts if a.manifest.is_quantized]
        limits = accuracy_expectation(artifact, own_data=False).limits(len(TEXTS))
        assert cosines.mean() >= limits.cosine
        assert cosines.min() >= (limits.worst_cosine or -1)

    return check


def answer(words, *, cwd=None, **request):
    """Run a reader: it takes JSON on standard input, and prints JSON as its last line."""
    done = subprocess.run(
        words,
        input=json.dumps({"texts": TEXTS, **request}),
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def python_of(variable, package):
    python = os.environ.get(variable, "")
    if not python:
        pytest.skip(f"set {variable} to the Python of an environment with {package}")
    return [python, "-I", "-c"]


def encode(folder):
    """Return the sentences as inputs of the graph: int64 (16, sequence)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(TEXTS)
    return {
        "input_ids": np.array([one.ids for one in encoded], np.int64),
        "attention_mask": np.array([one.attention_mask for one in encoded], np.int64),
        "token_type_ids": np.array([one.type_ids for one in encoded], np.int64),
    }


@pytest.mark.parametrize("variant", FILES)
def test_enginery(folder, variant, agrees, tmp_path):
    back = pull_model(str(folder), tmp_path / "back", variant=variant)
    with load_model(back, allow_failed=True) as model:
        agrees(variant, model.embed(TEXTS))


@pytest.mark.parametrize("variant", FILES)
def test_optimum(folder, variant, agrees):
    from optimum.onnxruntime import ORTModelForFeatureExtraction
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = ORTModelForFeatureExtraction.from_pretrained(
        folder, subfolder="onnx", file_name=FILES[variant]
    )
    inputs = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="np")
    tokens = model(**inputs).last_hidden_state
    agrees(variant, pooled(tokens, inputs["attention_mask"]))


@pytest.mark.parametrize("variant", FILES)
def test_onnxruntime(folder, variant, agrees):
    import onnxruntime

    feeds = encode(folder)
    session = onnxruntime.InferenceSession(
        folder / "onnx" / FILES[variant], providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, feeds), strict=True))
    vectors = pooled(found["last_hidden_state"], feeds["attention_mask"])
    agrees(variant, vectors)


SENTENCE_TRANSFORMERS = """
import json, sys
from sentence_transformers import SentenceTransformer
asked = json.load(sys.stdin)
model = SentenceTransformer(
    asked["folder"], backend="onnx",
    model_kwargs={"file_name": asked["file"], "provider": "CPUExecutionProvider"},
)
print(json.dumps(model.encode(asked["texts"]).tolist()))
"""


@pytest.mark.parametrize("variant", FILES)
def test_sentence_transformers(folder, variant, agrees):
    python = python_of("SENTENCE_TRANSFORMERS_PYTHON", "sentence-transformers and optimum-onnx")
    command = [*python, SENTENCE_TRANSFORMERS]
    vectors = answer(command, folder=str(folder), file=f"onnx/{FILES[variant]}")
    agrees(variant, vectors)


FASTEMBED = """
import json, sys
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType
asked = json.load(sys.stdin)
TextEmbedding.add_custom_model(
    model="my/minilm", pooling=PoolingType.MEAN, normalization=True,
    sources=ModelSource(hf="my/minilm"), dim=384, model_file=asked["file"],
)
model = TextEmbedding("my/minilm", specific_model_path=asked["folder"])
print(json.dumps([vector.tolist() for vector in model.embed(asked["texts"])]))
"""


@pytest.mark.parametrize("variant", FILES)
def test_fastembed(folder, variant, agrees):
    command = [*python_of("FASTEMBED_PYTHON", "fastembed"), FASTEMBED]
    agrees(variant, answer(command, folder=str(folder), file=f"onnx/{FILES[variant]}"))


def answer_of_node(script, **request):
    """Run a script of node where the packages are installed."""
    directory = os.environ.get("TRANSFORMERS_JS", "")
    if not directory or not shutil.which("node"):
        pytest.skip("set TRANSFORMERS_JS to where npm has installed @huggingface/transformers")
    return answer(["node", "--input-type=module", "-e", script], cwd=directory, **request)


TRANSFORMERS_JS = """
import fs from "node:fs";
import path from "node:path";
import { env, pipeline } from "@huggingface/transformers";
const asked = JSON.parse(fs.readFileSync(0));
env.allowRemoteModels = false;
env.localModelPath = path.dirname(asked.folder);
const options = asked.dtype ? { dtype: asked.dtype } : {};
const embed = await pipeline("feature-extraction", path.basename(asked.folder), options);
const found = await embed(asked.texts, { pooling: "mean", normalize: true });
console.log(JSON.stringify(found.tolist()));
"""


@pytest.mark.parametrize(
    ("dtype", "variant"),
    [("", "fp32"), ("fp32", "fp32"), ("fp16", "fp16"), ("q8", "quantized")],
)
def test_transformers_js(folder, dtype, variant, agrees):
    vectors = answer_of_node(TRANSFORMERS_JS, folder=str(folder), dtype=dtype)
    agrees(variant, vectors)


WEB_ASSEMBLY = """
import fs from "node:fs";
import * as ort from "onnxruntime-web";
const asked = JSON.parse(fs.readFileSync(0));
ort.env.wasm.numThreads = 1;
const externalData = asked.data.map((path) => ({
  path: path.split("/").pop(), data: new Uint8Array(fs.readFileSync(path)),
}));
const session = await ort.InferenceSession.create(
  new Uint8Array(fs.readFileSync(asked.graph)), { executionProviders: ["wasm"], externalData },
);
const feeds = Object.fromEntries(Object.entries(asked.feeds).map(([name, rows]) => [
  name, new ort.Tensor("int64", BigInt64Array.from(rows.flat().map(BigInt)),
                       [rows.length, rows[0].length]),
]));
const { last_hidden_state: tokens } = await session.run(feeds);
console.log(JSON.stringify({ dims: tokens.dims, data: Array.from(tokens.data) }));
"""


@pytest.mark.parametrize("variant", FILES)
def test_runtime_of_browsers(folder, variant, agrees):
    """A browser without WebGPU runs graphs in WebAssembly: transformers.js with onnxruntime-web."""
    feeds = encode(folder)
    graph = folder / "onnx" / FILES[variant]
    config = json.loads((folder / "config.json").read_text())
    # Only what config.json lists is loaded there.
    listed = config.get("transformers.js_config", {}).get("use_external_data_format", {})
    data = [str(graph) + "_data"] if listed.get(graph.name) else []
    found = answer_of_node(
        WEB_ASSEMBLY,
        graph=str(graph),
        data=data,
        feeds={name: array.tolist() for name, array in feeds.items()},
    )
    tokens = np.array(found["data"]).reshape(found["dims"])
    agrees(variant, pooled(tokens, feeds["attention_mask"]))
