import io
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.errors import EngineryError, InputError, OptionError, ProviderError
from enginery.predict import batch_predictor, stage
from enginery.runtime.model import load_model
from tests.predict.conftest import text_of
from tests.sounds import speech, wav
from tests.tiny import LABELS
from tests.tolerances import OUTPUTS, SCORES


@pytest.fixture
def bert(tiny):
    return tiny("bert", "feature-extraction")


@pytest.fixture
def classifier(tiny):
    return tiny("bert", "text-classification")


def test_vectors_are_cut_to_truncate_dim_if_nothing_else_is_asked_for(
    predict, rows, bert, reviews, tmp_path
):
    short = shutil.copytree(bert.path, tmp_path / "short")
    file = short / "config_sentence_transformers.json"
    file.write_text(json.dumps({"truncate_dim": 8}))
    commit_artifact(short, bert.manifest)
    texts = [text_of(index) for index in range(40)]
    with load_model(bert) as model, load_model(short) as cut:
        whole = model.embed(texts)
        np.testing.assert_allclose(cut.embed(texts), whole[:, :8], atol=OUTPUTS)
        np.testing.assert_allclose(cut.embed(texts, dimensions=16), whole[:, :16], atol=OUTPUTS)
        assert cut.embed([]).shape == (0, 8)
        assert any("truncate_dim" in note for note in cut.notes)
    predict(Artifact.open(short), reviews)
    np.testing.assert_allclose([row["embedding"] for row in rows()], whole[:, :8], atol=OUTPUTS)


@pytest.mark.parametrize("options", [{}, {"window": 7, "batch_tokens": 16, "workers": 3}])
def test_rows_keep_their_order_and_have_the_models_embeddings(
    predict, rows, bert, reviews, options
):
    report = predict(bert, reviews, part_rows=9, **options)
    found = rows()
    assert [row["id"] for row in found] == [f"00{index}" for index in range(40)]
    with load_model(bert) as model:
        expected = model.embed([text_of(index) for index in range(40)])
    np.testing.assert_allclose([row["embedding"] for row in found], expected, atol=OUTPUTS)
    assert {row["error"] for row in found} == {None}
    assert (report.counts.rows, report.bad_rows, report.worked) == (40, 0, True)


def test_parquet_has_fixed_size_vectors_and_keeps_the_inputs_types(predict, tmp_path, bert):
    table = pa.table(
        {
            "n": pa.array([1, None], pa.int8()),
            "text": ["warm", "cold"],
            "kind": pa.array(["a", "b"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    predict(bert, tmp_path / "in.parquet")
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert schema.field("embedding").type == pa.list_(pa.float32(), 32)
    assert [schema.field(name).type for name in table.column_names] == [
        field.type for field in table.schema
    ]
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.select(table.column_names).to_pylist() == table.to_pylist()


def test_batches_of_sorted_texts_are_hardly_padded(predict, bert, reviews):
    report = predict(bert, reviews, batch_tokens=64)
    assert 1 <= report.padding_ratio < 1.15
    unsorted = predict(bert, reviews, "other.parquet", window=4, batch_tokens=4096, workers=1)
    assert unsorted.padding_ratio > 1.2
    assert report.counts.tokens == unsorted.counts.tokens


@pytest.mark.parametrize("suffix", ["tsv", "jsonl", "parquet", "txt"])
def test_every_format_gives_the_same_vectors(predict, rows, tmp_path, bert, suffix):
    texts = [text_of(index) for index in range(5)]
    path = tmp_path / f"in.{suffix}"
    if suffix == "tsv":
        path.write_text("text\n" + "".join(f"{text}\n" for text in texts))
    elif suffix == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in texts))
    elif suffix == "txt":
        path.write_text("\n".join(texts))
    else:
        pq.write_table(pa.table({"text": texts}), path)
    predict(bert, path)
    found = rows()
    assert [row["text"] for row in found] == texts
    with load_model(bert) as model:
        np.testing.assert_allclose(
            [row["embedding"] for row in found], model.embed(texts), atol=OUTPUTS
        )


def test_csv_output_can_be_read_back(predict, tmp_path, classifier, reviews):
    predict(classifier, reviews, "out.csv", top_k=2)
    table = pacsv.read_csv(
        tmp_path / "out.csv", convert_options=pacsv.ConvertOptions(column_types={"id": pa.string()})
    )
    assert table.column("text").to_pylist() == [text_of(index) for index in range(40)]
    assert table.column("id")[3].as_py() == "003"
    scores = json.loads(table.column("scores")[0].as_py())
    assert scores[0]["label"] == table.column("label")[0].as_py()
    assert scores[0]["score"] == pytest.approx(table.column("score")[0].as_py())


def test_jsonl_lines_are_kept_as_they_are(predict, tmp_path, classifier):
    lines = ['{"text":"warm", "n": 1.10, "deep": {"a": [1, null]}}', '{"n":2,"text":"cold" }']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    predict(classifier, tmp_path / "in.jsonl", "out.jsonl")
    found = (tmp_path / "out.jsonl").read_text().splitlines()
    for line, out in zip(lines, found, strict=True):
        assert out.startswith(line.rstrip(" }"))
        assert json.loads(out).items() >= json.loads(line).items()
        assert json.loads(out)["label"] in LABELS["text-classification"]


def test_jsonl_columns_get_types_that_lose_nothing(predict, rows, tmp_path, classifier):
    lines = [
        {"text": "a", "n": 1, "mixed": 1, "big": 2**70, "half": 1},
        {"text": "b", "n": None, "mixed": "x", "list": [1], "half": 0.5},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    predict(classifier, tmp_path / "in.jsonl")
    first, second = rows()
    assert (first["n"], first["mixed"], first["big"], first["half"]) == (1, "1", str(2**70), 1.0)
    assert (second["n"], second["mixed"], second["list"], second["big"]) == (
        None,
        '"x"',
        "[1]",
        None,
    )


def test_bad_rows_have_an_error_and_other_rows_a_prediction(predict, rows, tmp_path, classifier):
    values = ["warm", None, 7, "", "  \t", "\ud800", "cold"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": v}) + "\n" for v in values))
    report = predict(classifier, tmp_path / "in.jsonl", "out.jsonl")
    found = rows("out.jsonl")
    assert [row["error"] for row in found] == [
        None,
        "text is null",
        "text is a int, expected text",
        "text is empty",
        "text is empty",
        "text contains a lone surrogate, which is not a character",
        None,
    ]
    assert [row["label"] is None for row in found] == [bool(row["error"]) for row in found]
    assert report.bad_rows == 5
    assert report.first_bad == "row 2: text is null"


def test_fail_fast_stops_at_the_first_bad_row(predict, tmp_path, classifier):
    (tmp_path / "in.csv").write_text("id,text\n1,warm\n2,\n3,\n")
    with pytest.raises(InputError, match=r"row 2: text is empty"):
        predict(classifier, tmp_path / "in.csv", fail_fast=True)
    assert not (tmp_path / "out.parquet").exists()


def test_rows_that_the_model_rejects_are_found_by_bisection(predict, rows, tmp_path, tiny):
    texts = [f"the pump is {'[MASK]' if index % 5 else 'warm'}." for index in range(12)]
    (tmp_path / "in.txt").write_text("\n".join(texts))
    predict(tiny("bert", "fill-mask"), tmp_path / "in.txt", top_k=3)
    for index, row in enumerate(rows()):
        if index % 5:
            assert [len(mask) for mask in row["masks"]] == [3]
        else:
            assert row["error"] == "the text has no [MASK]."


def test_spans_are_a_list_of_structs(predict, rows, tmp_path, tiny):
    tagger = tiny("bert", "token-classification")
    (tmp_path / "in.txt").write_text("Marie Curie lived in Paris.\nAda wrote.\n")
    predict(tagger, tmp_path / "in.txt", aggregation="none")
    with load_model(tagger) as model:
        expected = model.tag(["Marie Curie lived in Paris."], aggregation="none")[0]
    found = rows()[0]["spans"]
    assert [(s["start"], s["end"], s["label"], s["text"]) for s in found] == [
        (s.start, s.end, s.label, s.text) for s in expected
    ]


def test_questions_are_answered_from_contexts(predict, rows, tmp_path, tiny):
    reader = tiny("bert", "question-answering")
    pair = ("Where is the cat?", "A small cat sleeps on the boat under the tree.")
    (tmp_path / "in.jsonl").write_text(json.dumps({"question": pair[0], "context": pair[1]}))
    predict(reader, tmp_path / "in.jsonl", top_k=2)
    with load_model(reader) as model:
        expected = model.answer([pair], top_k=2)[0]
    (row,) = rows()
    assert (row["answer"], row["start"], row["end"]) == (
        expected[0].text,
        expected[0].start,
        expected[0].end,
    )
    assert [answer["text"] for answer in row["answers"]] == [answer.text for answer in expected]


def test_folder_of_images_with_an_invalid_one(predict, rows, tmp_path, tiny):
    from PIL import Image

    folder = tmp_path / "photos"
    folder.mkdir()
    for index in range(5):
        Image.new("RGB", (40, 30), (index * 50, 20, 90)).save(folder / f"{index}.png")
    (folder / "3.png").write_bytes(b"no image at all")
    model = tiny("vit", "image-classification")
    report = predict(model, folder)
    found = rows()
    assert [row["path"] for row in found] == [f"{index}.png" for index in range(5)]
    assert [bool(row["label"]) for row in found] == [True, True, True, False, True]
    assert "is not a complete image" in found[3]["error"]
    assert report.bad_rows == 1
    with load_model(model) as loaded:
        expected = loaded.classify_images([folder / "4.png"])[0]
    assert found[4]["label"] == expected.label


@pytest.mark.parametrize("table", [False, True])
def test_folder_or_table_of_audio_with_an_invalid_file(predict, rows, tmp_path, tiny, table):
    pytest.importorskip("soundfile", reason="pip install 'enginery[audio]'")
    folder = tmp_path / "calls"
    folder.mkdir()
    for index in range(5):
        (folder / f"{index}.wav").write_bytes(wav(speech(0.2 + 0.1 * (index % 2), seed=index)))
    (folder / "3.wav").write_bytes(b"no sound at all")
    model = tiny("wav2vec2", "automatic-speech-recognition")
    if table:
        source = tmp_path / "calls.csv"
        source.write_text("path\n" + "".join(f"calls/{index}.wav\n" for index in range(5)))
        report = predict(model, source, column="path")
    else:
        report = predict(model, folder)
    found = rows()
    assert [row["path"].removeprefix("calls/") for row in found] == [f"{i}.wav" for i in range(5)]
    assert [row["score"] is None for row in found] == [False, False, False, True, False]
    assert "is not an audio file of a supported format" in found[3]["error"]
    assert report.bad_rows == 1
    with load_model(model) as loaded:
        expected = loaded.transcribe([folder / "4.wav"])[0]
    assert found[4]["text"] == expected.text
    assert found[4]["score"] == pytest.approx(expected.score, abs=SCORES)


def test_truncated_audio_is_counted(predict, tmp_path, tiny):
    pytest.importorskip("soundfile", reason="pip install 'enginery[audio]'")
    for index, seconds in enumerate((0.3, 2.0)):
        (tmp_path / f"{index}.wav").write_bytes(wav(speech(seconds)))
    report = predict(tiny("audio-spectrogram-transformer", "audio-classification"), tmp_path)
    assert (report.counts.rows, report.counts.truncated) == (2, 1)


def test_folder_of_another_kind_than_the_model_takes_is_an_error(predict, tmp_path, tiny, bert):
    folder = tmp_path / "calls"
    folder.mkdir()
    (folder / "a.wav").write_bytes(wav(speech(0.2)))
    with pytest.raises(
        InputError, match=r"input is audio, .* feature-extraction, which takes text"
    ):
        predict(bert, folder)
    (folder / "a.png").touch()  # with images, it is a folder of images
    with pytest.raises(
        InputError, match=r"input is images, .* which takes audio\. .* --format audio"
    ):
        predict(tiny("wav2vec2", "audio-classification"), folder)


def test_long_texts_and_whole_books_are_truncated_and_counted(predict, rows, tmp_path, bert):
    book = "the pump is warm again and the motor is cold. " * 220_000  # 10 MB
    texts = ["warm", "the pump is warm. " * 60, book]
    pq.write_table(pa.table({"text": texts}), tmp_path / "in.parquet")
    report = predict(bert, tmp_path / "in.parquet")
    assert report.counts.truncated == 2
    with load_model(bert) as model:
        expected = model.embed([*texts[:2], book[:20_000]])
    np.testing.assert_allclose([row["embedding"] for row in rows()], expected, atol=OUTPUTS)


def test_csv_cell_of_ten_megabytes(predict, rows, tmp_path, classifier):
    text = "warm \n again, " * 800_000
    (tmp_path / "in.csv").write_text(f'id,text\n1,"{text}"\n2,cold\n')
    report = predict(classifier, tmp_path / "in.csv")
    assert [row["text"] == text for row in rows()] == [True, False]
    assert report.counts.truncated == 1


def test_standard_input_needs_a_format(predict, rows, tmp_path, bert, monkeypatch):
    def give(content):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))

    give(b"text\nwarm\n")
    with pytest.raises(OptionError, match="but standard input has no suffix"):
        predict(bert, "-")
    predict(bert, "-", format="csv")
    assert [row["text"] for row in rows()] == ["warm"]
    # The same bytes once more are the same input.
    give(b"text\nwarm\n")
    assert not predict(bert, "-", format="csv").worked
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.parquet", "out.parquet.json"]


def test_output_that_is_up_to_date_is_kept(predict, tmp_path, classifier, reviews):
    first = predict(classifier, reviews)
    before = (tmp_path / "out.parquet").stat()
    second = predict(classifier, reviews, workers=5, window=3)
    after = (tmp_path / "out.parquet").stat()
    assert (second.worked, second.counts) == (False, first.counts)
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)


def test_output_made_from_something_else_is_only_replaced_by_force(
    predict, rows, tmp_path, classifier, reviews
):
    predict(classifier, reviews)
    with pytest.raises(InputError, match="made from something else: top_k: 1 → 2"):
        predict(classifier, reviews, top_k=2)
    reviews.write_text("id,text\n9,other\n")
    with pytest.raises(InputError, match=r"made from something else: input: .* → .*--force"):
        predict(classifier, reviews)
    predict(classifier, reviews, force=True)
    assert [row["id"] for row in rows()] == ["9"]


def test_changed_or_unknown_output_is_an_error(predict, tmp_path, classifier, reviews):
    predict(classifier, reviews)
    with (tmp_path / "out.parquet").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(InputError, match="was changed"):
        predict(classifier, reviews)
    predict(classifier, reviews, force=True)
    content = (tmp_path / "out.parquet").read_bytes()
    (tmp_path / "out.parquet").write_bytes(
        content[:999] + bytes([content[999] ^ 1]) + content[1000:]
    )
    with pytest.raises(InputError, match=r"was changed: its sha256 is .* as in its report"):
        predict(classifier, reviews)
    (tmp_path / "mine.csv").write_text("mine\n")
    with pytest.raises(InputError, match=r"mine\.csv\.json is missing or cannot be read"):
        predict(classifier, reviews, "mine.csv")
    assert (tmp_path / "mine.csv").read_text() == "mine\n"


@pytest.mark.parametrize("kept", [0, 5])
def test_vectors_have_the_dimensions_that_are_asked_for(
    predict, rows, reviews, tiny, tmp_path, kept
):
    artifact = tiny("bert", "feature-extraction")
    predict(artifact, reviews, dimensions=kept)
    with load_model(artifact) as model:
        expected = model.embed([row["text"] for row in rows()], dimensions=kept or None)
    np.testing.assert_allclose([row["embedding"] for row in rows()], expected, atol=1e-6)
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert schema.field("embedding").type.list_size == (kept or 32)


def test_a_column_gets_another_name_than_one_of_the_input(predict, rows, tmp_path, classifier):
    (tmp_path / "in.csv").write_text("text,label\nwarm,glad\n")
    predict(classifier, tmp_path / "in.csv")
    (row,) = rows()
    assert row["label"] == "glad"
    assert row["predicted_label"] in LABELS["text-classification"]
    assert list(row) == ["text", "label", "predicted_label", "score", "error"]


@pytest.mark.parametrize("prefix", ["", "predicted_"])
def test_an_input_with_predicted_columns_needs_another_prefix(
    predict, tmp_path, classifier, prefix
):
    (tmp_path / "in.csv").write_text("text,label,predicted_label\nwarm,glad,sad\n")
    with pytest.raises(InputError, match=r"has a column 'predicted_label'.*--prefix model_"):
        predict(classifier, tmp_path / "in.csv", prefix=prefix)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("out.xlsx", {}, "has the suffix '.xlsx', expected .parquet"),
        ("reviews.csv", {"force": True}, "is the input, which is never overwritten"),
        ("o.csv", {"pair_column": "id", "top_k": -1}, "'top_k' is -1, expected 0 or more"),
        ("o.csv", {"encoding": "utf-9"}, "'encoding' is 'utf-9', expected an encoding"),
        ("o.csv", {"delimiter": ";;"}, "expected one character"),
    ],
    ids=["suffix", "input", "top_k", "encoding", "delimiter"],
)
def test_invalid_options(predict, classifier, reviews, name, options, message):
    with pytest.raises(EngineryError, match=message):
        predict(classifier, reviews, name, **options)


def test_rows_with_nan_are_bad(predict, rows, monkeypatch, bert, reviews):
    from enginery.runtime.onnxruntime.runner import OrtRunner

    run = OrtRunner.__call__

    def poisoned(self, feeds, names=()):
        outputs = run(self, feeds, names)
        for values in outputs.values():
            values[0] = np.nan
        return outputs

    monkeypatch.setattr(OrtRunner, "__call__", poisoned)
    report = predict(bert, reviews, batch_rows=10, batch_tokens=512)
    assert report.bad_rows == 5  # the first row of each batch
    assert {row["error"] for row in rows()} == {None, "the model returned NaN or infinity"}


def test_output_is_locked_while_a_run_writes_it(predict, tmp_path, classifier, reviews):
    with (
        stage.lock_output(tmp_path / "out.parquet"),
        pytest.raises(InputError, match="being written by another process"),
    ):
        predict(classifier, reviews)


def test_session_options_reach_the_runner_but_not_the_fingerprint(
    predict, classifier, reviews, monkeypatch
):
    given = []
    real = batch_predictor.OrtRunner

    def runner(artifact, options, **chosen):
        given.append(options)
        return real(artifact, options, **chosen)

    monkeypatch.setattr(batch_predictor, "OrtRunner", runner)
    assert predict(classifier, reviews, shrink_arena=True, io_binding=False).worked
    assert (given[0].io_binding, given[0].cuda_graph, given[0].shrink_arena) == (False, False, True)
    assert given[0].keep_optimized
    assert predict(classifier, reviews, "plain.parquet", optimized_graph=False).worked
    assert not given[1].keep_optimized
    assert not predict(classifier, reviews).worked  # the predictions are the same


def test_providers_come_from_the_environment_variable(predict, classifier, reviews, monkeypatch):
    monkeypatch.setenv("ENGINERY_PROVIDERS", "cuda; cuda.gpu_mem_limit=much")
    with pytest.raises(OptionError, match="ENGINERY_PROVIDERS: option 'gpu_mem_limit' for cuda"):
        predict(classifier, reviews)
    assert predict(classifier, reviews, providers="cpu").worked


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"cuda_graph": True}, ProviderError, "cuda_graph is set, but cpu has no CUDA graphs"),
        ({"providers": "cuda", "cuda_graph": True, "io_binding": False}, OptionError, "buffers"),
        ({"providers": "cpu", "provider_option": ("cpu.a=1",)}, OptionError, "unknown option 'a'"),
    ],
)
def test_unsuitable_provider_options_are_an_error_before_anything_is_opened(
    predict, classifier, reviews, monkeypatch, options, kind, message
):
    monkeypatch.setattr(batch_predictor, "OrtRunner", None)
    with pytest.raises(kind, match=message):
        predict(classifier, reviews, **options)


def test_token_offsets_are_computed_only_for_spans(predict, tiny, reviews, monkeypatch):
    from enginery.runtime.text.tokenizer import FastEncoder

    real, quick = FastEncoder.encode, []

    def encode(self, texts):
        quick.append(len(texts))
        return real(self, texts)

    monkeypatch.setattr(FastEncoder, "encode", encode)
    predict(tiny("bert", "token-classification"), reviews, "spans.jsonl")
    assert not quick
    predict(tiny("bert", "text-classification"), reviews, "labels.jsonl")
    assert quick


def save_photo(path, shade):
    from PIL import Image

    Image.new("RGB", (40, 30), (shade, 20, 90)).save(path)


def test_output_may_lie_in_the_folder_of_its_input(predict, tmp_path, tiny):
    for number, name in enumerate("ab"):
        save_photo(tmp_path / f"{name}.png", number * 50)
    model = tiny("vit", "image-classification")
    assert predict(model, tmp_path).counts.rows == 2
    assert not predict(model, tmp_path).worked  # it is no part of its own input
    save_photo(tmp_path / "c.png", 200)
    with pytest.raises(InputError, match="was made from something else: input"):
        predict(model, tmp_path)


def test_pictures_that_a_table_names_are_part_of_the_input(predict, tmp_path, tiny):
    for number, name in enumerate("ab"):
        save_photo(tmp_path / f"{name}.png", number * 50)
    table = tmp_path / "photos.csv"
    table.write_text("text,price\na.png,1\nb.png,2\nb.png,3\nmissing.png,4\n")
    model = tiny("vit", "image-classification")
    assert predict(model, table).bad_rows == 1
    assert not predict(model, table).worked
    for change in (
        lambda: save_photo(tmp_path / "b.png", 99),
        lambda: save_photo(tmp_path / "missing.png", 99),
        (tmp_path / "a.png").unlink,
    ):
        change()
        with pytest.raises(InputError, match="was made from something else: named files"):
            predict(model, table)
        predict(model, table, force=True)
        assert not predict(model, table).worked


def test_picture_that_is_replaced_during_the_run_is_named(predict, tmp_path, tiny, monkeypatch):
    save_photo(tmp_path / "a.png", 50)
    table = tmp_path / "photos.csv"
    table.write_text("text\na.png\n")
    stream = batch_predictor.BatchPredictor.stream

    def replacing(*arguments, **options):
        save_photo(tmp_path / "a.png", 99)
        return stream(*arguments, **options)

    monkeypatch.setattr(batch_predictor.BatchPredictor, "stream", replacing)
    with pytest.raises(InputError, match=r"a\.png changed while it was read"):
        predict(tiny("vit", "image-classification"), table)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "a.png",
        "photos.csv",
    ]


@pytest.mark.parametrize("name", ["reviews.csv", "model/model.onnx", "model/tokenizer.json"])
def test_input_that_changes_during_the_run_leaves_no_part(
    predict, tmp_path, tiny, reviews, monkeypatch, name
):
    shutil.copytree(tiny("bert", "text-classification").path, tmp_path / "model")
    stream = batch_predictor.BatchPredictor.stream

    def growing(*arguments, **options):
        with (tmp_path / name).open("a") as file:
            file.write("41,one more\n")
        return stream(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(batch_predictor.BatchPredictor, "stream", growing)
        with pytest.raises(InputError, match=f"{name} changed while it was read. Run the command"):
            predict(Artifact.open(tmp_path / "model"), reviews, part_rows=8)
    assert not (tmp_path / "out.parquet").exists()
    if name == "reviews.csv":
        assert predict(Artifact.open(tmp_path / "model"), reviews).counts.rows == 41


def test_output_is_locked_for_other_homes_and_other_paths(
    predict, tmp_path, classifier, reviews, monkeypatch
):
    (tmp_path / "link").symlink_to(tmp_path)
    with stage.lock_output(tmp_path / "out.parquet"):
        monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "other"))
        with pytest.raises(InputError, match="being written by another process"):
            predict(classifier, reviews, "link/out.parquet")
