from __future__ import annotations

import base64
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from enginery.bench.report import page
from enginery.bench.report.curves import draw_figures
from enginery.bench.report.page import write_report
from enginery.core.errors import ArtifactError
from enginery.core.figures import figure_svg
from enginery.reports.benchmark import Advice
from enginery.reports.engines import BuildReport
from tests.bench.chromium import Chromium, find_chromium
from tests.bench.sample_results import (
    make_backend_record,
    make_case,
    make_image_result,
    make_result,
)
from tests.reports import samples

EMPTY_FIGURE = '<svg xmlns="http://www.w3.org/2000/svg" width="460.8pt" height="259.2pt"/>'


class Outline(HTMLParser):
    """The tags, links and texts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data):
        self.words.append(data.strip())


def make_sweep_result(names=("enginery", "onnxruntime", "optimum", "pytorch")):
    pairs = [("enginery", "pytorch"), ("onnxruntime", "pytorch"), ("onnxruntime", "enginery")]
    pairs = pairs if "pytorch" in names else [(names[1], names[0])]
    cases = [
        make_case(
            {"batch": batch, "sequence": sequence},
            {n: (1 + i) * batch * sequence / 64 for i, n in enumerate(names)},
            pairs=pairs,
        )
        for batch in (1, 8, 32)
        for sequence in (16, 128, 512)
    ]
    return make_result(contenders=[make_backend_record(name) for name in names], cases=cases)


def save_result(directory, result):
    (directory / "reports").mkdir(parents=True, exist_ok=True)
    (directory / "reports" / "benchmark.json").write_bytes(result.to_json())
    return directory


@pytest.fixture
def drawn(tmp_path):
    """Return an artifact with all reports that the page shows."""
    artifact = samples.reported_artifact(tmp_path / "minilm")
    artifact = artifact.annotate(removed=["reports/benchmark.json"])  # tests write their own
    advice = Advice("INT8 is slower", "int8: enginery compared", "Use FP16.")
    save_result(artifact.path, replace(make_sweep_result(), advice=[advice]))
    for name in ("quantization.svg", "lengths.svg", "layer-errors.svg"):
        (artifact.path / "reports" / name).write_text(EMPTY_FIGURE)
    return artifact


@pytest.fixture
def artifact(drawn, monkeypatch):
    """Return the same artifact, whose page has no figures of its benchmark."""
    monkeypatch.setattr(page, "can_draw", lambda: False)
    return drawn


@pytest.mark.more
def test_page_shows_all_reports_loads_nothing_and_is_reproducible(drawn):
    artifact = drawn
    text = write_report(artifact.path).read_text()
    assert write_report(artifact.path).read_text() == text
    outline = Outline(text)
    words = set(outline.words)
    assert {
        "Model",
        "Stages",
        "Quantization",
        "Engines",
        "Speed",
        "Environment",
        "36 of 38 layers in INT8",
    } <= words
    assert {"last_hidden_state", "failed", "export"} <= words
    assert "opset=20" in text
    assert "2.00x as fast (2.00x to 2.00x)" in words
    assert outline.tags.count("img") == 4 + 3
    assert all(link.startswith(("#", "data:")) for link in outline.links)
    assert not {"script", "svg", "iframe"} & set(outline.tags)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", text)
    figures = {path.name for path in (artifact.path / "reports").glob("*.svg")}
    assert {
        "latency-by-batch.svg",
        "latency-by-sequence.svg",
        "throughput.svg",
        "speedup.svg",
    } <= figures


def test_page_has_no_path_of_the_machine(artifact, tmp_path):
    home = str(Path.home())
    stage, *later = artifact.manifest.stages
    source = artifact.manifest.source.model_copy(
        update={"kind": "directory", "id": f"{home}/models/minilm"}
    )
    options = {"data": "/elsewhere/my data/reviews.csv", "exclude": ["/encoder/MatMul"]}
    changed = stage.model_copy(
        update={
            "options": options,
            "changed_options": ("data", "exclude"),
            "notes": ("read /elsewhere/my data/reviews.csv, not /encoder/layer.0/MatMul",),
        }
    )
    manifest = artifact.manifest.model_copy(update={"stages": (changed, *later), "source": source})
    (artifact.path / "manifest.json").write_bytes(manifest.to_bytes())
    result = make_sweep_result()
    subjects = [{**s, "path": str(tmp_path / "models" / s["name"])} for s in result.subjects]
    notes = [f"{home}/x/model.onnx: odd", f"see {tmp_path}/a.log."]
    options = {**result.options, "images": r"C:\Users\me\photos"}
    left_out = {"optimum": r"C:\Users\me\photos\0.png is damaged"}
    result = replace(result, subjects=subjects, notes=notes, left_out=left_out, options=options)
    save_result(artifact.path, result)
    text = re.sub(r"data:image[^\"]+", "", write_report(artifact.path).read_text())
    assert not re.search(r"/(tmp|home|root|elsewhere)\b", text), text
    assert "Users" not in text
    words = " ".join(Outline(text).words)
    assert "source minilm" in words
    assert "data=reviews.csv, exclude=[&#34;/encoder/MatMul&#34;]" in text
    assert "export: read reviews.csv, not /encoder/layer.0/MatMul" in words
    assert "note: model.onnx: odd" in words


def test_page_names_a_damaged_report_and_shows_the_rest(artifact):
    artifact.annotate(reports={"reports/validation.json": b"{", "reports/engines.json": b"{}"})
    words = " ".join(Outline(write_report(artifact.path).read_text()).words)
    assert "reports/validation.json cannot be read" in words
    assert "reports/engines.json cannot be read: summary is missing" in words
    assert str(artifact.path) not in words.partition("Environment")[0]
    assert "36 of 38 layers" in words


def test_page_names_a_number_beyond_float(artifact):
    report = json.loads((artifact.path / "reports/validation.json").read_bytes())
    report["cases"][0]["outputs"][0]["max_abs"] = 10**400
    artifact.annotate(reports={"reports/validation.json": json.dumps(report).encode()})
    words = " ".join(Outline(write_report(artifact.path).read_text()).words)
    assert "cases.0.outputs.0.max_abs: found 1000000" in words
    assert "expected a valid number" in words


@pytest.mark.parametrize("content", ['{"schema_version": 9}', "[" * 200_000, "[" * 700 + "]" * 700])
def test_benchmark_of_another_version_is_an_error(tmp_path, content):
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "benchmark.json").write_text(content)
    with pytest.raises(ArtifactError, match="cannot be read"):
        write_report(tmp_path)


def test_empty_directory_is_an_error(tmp_path):
    with pytest.raises(ArtifactError, match="is not an artifact"):
        write_report(tmp_path)


def test_text_is_escaped(artifact):
    evil = "<script>alert('x')</script>&\"'"
    result = make_sweep_result()
    contenders = [replace(record, label=evil, notes=[evil]) for record in result.contenders]
    save_result(
        artifact.path,
        replace(
            result, contenders=contenders, notes=[evil], machine={**result.machine, "cpu": evil}
        ),
    )
    for name in ("validation.json", "quantization.json", "engines.json"):
        report = json.loads((artifact.path / "reports" / name).read_bytes())
        report |= {"summary": evil, "notes": [evil]}
        artifact.annotate(reports={f"reports/{name}": json.dumps(report).encode()})
    text = write_report(artifact.path).read_text()
    assert "<script" not in text
    assert "script" not in Outline(text).tags
    assert Outline(text).words.count(evil) >= 3 * 2 + 4


HOSTILE = [
    "<svg/onload=alert(1)><a xlink:href=javascript:alert(1)></a></svg>",
    "<svg><script>alert(1)</script><image href='https://example.org/x.png'/></svg>",
    '"><script>alert(1)</script>',
    "<svg>" + "<!--" * 100_000,
    "\ud800</svg>",
]


@pytest.mark.parametrize("svg", HOSTILE, ids=lambda svg: svg[:12].encode(errors="replace").decode())
def test_hostile_figure_is_only_an_image(tmp_path, svg):
    save_result(tmp_path, make_result(contenders=[make_backend_record("enginery")]))
    (tmp_path / "reports/engines.json").write_bytes(BuildReport("none", [], []).to_json())
    (tmp_path / "reports/lengths.svg").write_bytes(svg.encode(errors="surrogatepass"))
    text = write_report(tmp_path).read_text()
    outline = Outline(text)
    assert not {"svg", "script", "image"} & set(outline.tags)
    (address,) = [link for link in outline.links if link.startswith("data:image")]
    held = base64.b64decode(address.removeprefix("data:image/svg+xml;base64,"), validate=True)
    assert held == svg.encode(errors="surrogatepass").decode(errors="replace").encode()
    head = text.partition("</head>")[0]
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'\"" in head
    assert "script-src" not in head


@pytest.mark.parametrize("change", [{"contenders": []}, {"subjects": []}])
def test_inconsistent_benchmark_is_an_error(tmp_path, change):
    save_result(tmp_path, replace(make_sweep_result(), **change))
    with pytest.raises(ArtifactError, match="is inconsistent"):
        write_report(tmp_path)


def test_page_names_a_huge_figure_and_shows_the_rest(artifact):
    with (artifact.path / "reports" / "lengths.svg").open("wb") as stream:
        stream.truncate(2**22 + 1)
    outline = Outline(write_report(artifact.path).read_text())
    assert "reports/lengths.svg cannot be read: it has more than 4 MiB" in " ".join(outline.words)
    assert outline.tags.count("img") == 2


def test_page_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "can_draw", lambda: False)
    text = write_report(save_result(tmp_path, make_sweep_result())).read_text()
    assert "no figures were drawn" in text
    assert "<img" not in text


def test_figures_without_data_are_not_drawn():
    assert set(draw_figures(make_sweep_result())) == {
        "latency-by-batch",
        "latency-by-sequence",
        "throughput",
        "speedup",
    }
    assert set(draw_figures(make_image_result())) == {"images"}
    one = make_result(
        contenders=[make_backend_record("enginery")], cases=[make_case({}, {"enginery": 1.0})]
    )
    assert draw_figures(one) == {}


def test_new_result_replaces_old_figures_but_not_those_of_other_stages(tmp_path):
    save_result(tmp_path, make_sweep_result())
    write_report(tmp_path)
    reports = tmp_path / "reports"
    (reports / "quantization.svg").write_text("<svg></svg>")
    assert (reports / "throughput.svg").is_file()
    write_report(save_result(tmp_path, make_image_result()))
    assert {path.name for path in reports.glob("*.svg")} == {"images.svg", "quantization.svg"}


def axes_of(result, name):
    """Draw a figure of a benchmark and return its axes."""
    from matplotlib import figure

    axes = figure.Figure().subplots()
    draw_figures(result)[name][1](axes)
    return axes


def texts_of(result, name):
    """Return the texts in a figure of a benchmark."""
    svg = figure_svg(draw_figures(result)[name][1])
    texts = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return {"".join(text.itertext()) for text in texts}


def test_speedup_has_a_log_axis_and_hollow_markers_without_intervals():
    times = {"enginery": 1.0, "pytorch": 4.0}
    contenders = [make_backend_record(name) for name in times]
    pairs = [("enginery", "pytorch")]
    cases = [
        make_case({"batch": 1}, times, pairs=pairs),
        make_case({"batch": 8}, times, pairs=pairs, rounds=3),
    ]
    axes = axes_of(make_result(contenders=contenders, cases=cases), "speedup")
    assert axes.get_xscale() == "log"
    marks = [bar[0].get_fillstyle() for bar in axes.containers]
    assert marks == ["full", "none"]


def test_log_axis_has_labels_between_the_powers_of_ten():
    result = make_sweep_result()
    wide = [replace(c, interval=(0.15, 6.0)) for c in result.cases[0].comparisons]
    case = replace(result.cases[0], comparisons=wide)
    assert {"0.5", "1", "2", "5"} <= texts_of(replace(result, cases=[case]), "speedup")
    near = [replace(c, speedup=1.2, interval=(1.1, 1.3)) for c in result.cases[0].comparisons]
    case = replace(result.cases[0], comparisons=near)
    assert "1.2" in texts_of(replace(result, cases=[case]), "speedup")


def test_unclear_ratio_is_an_interval_without_a_marker():
    result = make_sweep_result()
    shown = result.cases[0].comparisons[0]
    unclear = replace(shown, interval=(0.1, 9.0))
    cases = [replace(result.cases[0], comparisons=[unclear]), *result.cases[1:]]
    axes = axes_of(replace(result, cases=cases), "speedup")
    assert [bar[0].get_visible() for bar in axes.containers][:2] == [False, True]


def test_number_of_pixels_with_channels_last():
    result = make_image_result()
    images = [replace(image, shape=[1, 640, 960, 3]) for image in result.images.images]
    last = replace(result, images=replace(result.images, images=images, layout="last"))
    axes = axes_of(last, "images")
    assert set(axes.lines[0].get_xdata()) == {0.6144}


def test_latency_axis_is_labelled_with_the_measured_sizes():
    texts = texts_of(make_sweep_result(), "latency-by-batch")
    assert {"1", "8", "32", "batch", "latency, ms", "enginery", "pytorch"} <= texts


@pytest.mark.skipif(not find_chromium(), reason="no Chromium is installed (apt install chromium)")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["artifact", "images", "several"])
def test_page_in_a_browser(request, tmp_path, dark, kind):
    """Check the layout in Chromium; screenshots stay in pytest's temporary directory."""
    if kind == "artifact":
        directory = request.getfixturevalue("drawn").path
    elif kind == "several":
        names = [
            f"bert-base-uncased-{p}: {k}"
            for p in ("fp16", "int8")
            for k in ("enginery", "onnxruntime")
        ]
        directory = save_result(tmp_path / "several", make_sweep_result(names))
    else:
        directory = save_result(tmp_path / "images", make_image_result())
    html = write_report(directory)
    with Chromium(find_chromium(), tmp_path) as browser:
        for width in (1280, 400, 360):
            picture = tmp_path / f"{kind}-{width}-{'dark' if dark else 'light'}.png"
            look = browser.look(html, width=width, picture=picture, dark=dark)
            assert look.overflow == 0
            assert look.wide == []
            assert look.medians <= width
            assert look.logged == []
            assert look.repeated_ids == []
            assert look.smallest_text >= 8
            assert picture.stat().st_size > 10_000
