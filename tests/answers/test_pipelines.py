"""Answers to raw inputs beside those of transformers' pipelines, for models of many types.

    $ pytest -m slow -rP --prefork tests/answers/test_pipelines.py
    $ pytest -m slow -rP tests/answers/test_pipelines.py -k generate-gpt2

A model is exported, and `load_model` answers 20 raw inputs: each alone, and all in one call. The
pipeline answers each alone, since an answer must not depend on the others. `-rP` prints a line for
each model, and each answer that is not equal.
"""

from __future__ import annotations

import shutil

import pytest

from enginery import EngineryError, export_model, load_model
from tests.answers.models import CASES, save_model
from tests.answers.sides import difference, model_answers, pipeline_answers, raw_inputs


def _attempt(answer, *arguments):
    """Return an answer and no error, or the error in words."""
    try:
        return answer(*arguments), ""
    except EngineryError as error:
        return None, error.message
    except Exception as error:  # a pipeline may fail with any
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answers_are_those_of_the_pipeline(case, tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    save_model(case, tmp_path / "model")
    if case.refused:
        with pytest.raises(EngineryError, match=case.refused):
            export_model(str(tmp_path / "model"), task=case.task)
        return
    artifact = export_model(str(tmp_path / "model"), task=case.task, out=tmp_path / "artifact")
    raws = raw_inputs(case, tmp_path)
    pipeline = pipeline_answers(case, tmp_path / "model")
    expected = [_attempt(pipeline, raw) for raw in raws]
    lines, counts = [], {"equal": 0, "refused": 0, "rejected": 0, "DIFFERENT": 0}
    with load_model(artifact.path, providers="cpu") as model:
        alone = [_attempt(lambda raw: model_answers(case, model, [raw])[0], raw) for raw in raws]
        answered = [index for index, (_, error) in enumerate(alone) if not error]
        together = dict(
            zip(answered, model_answers(case, model, [raws[i] for i in answered]), strict=True)
        )
    for index, raw in enumerate(raws):
        (wanted, rejection), (answer, refusal) = expected[index], alone[index]
        if rejection:
            verdict, word = "rejected", f"by the pipeline: {rejection}"
        elif refusal:
            verdict, word = "refused", refusal
        else:
            word = difference(answer, wanted)
            if not word and (word := difference(together[index], wanted)):
                word = f"in the batch: {word}"
            verdict = "DIFFERENT" if word else "equal"
        counts[verdict] += 1
        if word:
            lines.append(f"  {verdict} {str(raw)[:40]!r}: {word[:150]}")
    print(case.name, counts, *lines, sep="\n")  # noqa: T201 the table is for the reader of `-rP`
    assert not counts["DIFFERENT"], "\n".join(line for line in lines if "DIFFERENT" in line)
    assert counts["equal"] >= 12, "\n".join(lines)
    shutil.rmtree(tmp_path / "artifact")
