"""Decoders with a cache are calibrated on prompts and on steps, from texts alone."""

import json

import numpy as np
import pytest

from enginery import load_model, validate_model
from enginery.core.errors import InputError
from enginery.quantize import stage
from enginery.quantize.calibration.batches import make_batches
from enginery.quantize.calibration.data import CalibrationData
from enginery.quantize.calibration.prompts import takes_prompts
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.text.tokenizer import TextTokenizer
from tests.tiny import TEXT

TASK = "text-generation-with-past"


@pytest.fixture(params=["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def decoder(request, tiny):
    return tiny(request.param, TASK)


def test_a_text_is_a_prompt_and_a_step_with_its_cache(decoder):
    (record,) = decoder.manifest.graphs
    assert takes_prompts(record)
    texts = ["a", "The engine is warm", "", "It is warm"]
    data = CalibrationData("texts", texts, (), "", "")
    batches, held_out = make_batches(decoder, record, data, seed=0)
    assert [batch.rows for batch in batches] == [batch.rows for batch in held_out]
    encoded = TextTokenizer.open(decoder.path).encode_untruncated(texts, special=True)
    usable = [row for row, encoding in enumerate(encoded) if len(encoding.ids) > 1]
    assert sorted(row for batch in batches for row in batch.rows) == sorted(usable * 2)
    with OrtRunner(decoder) as runner:
        for prompt, step in zip(batches[::2], batches[1::2], strict=True):
            assert prompt.rows == step.rows
            before, after = prompt.load(), step.load()
            ids = np.concatenate([before["input_ids"], after["input_ids"]], axis=1)
            assert ids.tolist() == [list(encoded[row].ids) for row in prompt.rows]
            length = before["input_ids"].shape[1]
            past = [name for name in before if name.startswith("past")]
            assert {before[name].shape[2] for name in past} == {0}
            assert {after[name].shape[2] for name in past} == {length}
            # Together they are one run of all tokens.
            whole = {
                **{name: before[name] for name in past},
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "position_ids": np.arange(length + 1)[None].repeat(len(ids), 0),
            }
            expected = runner({name: whole[name] for name in before})
            found = runner(after)
            np.testing.assert_allclose(found["logits"], expected["logits"][:, -1:], atol=1e-5)


@pytest.mark.more
def test_int8_of_a_decoder_generates(decoder, quantized, tmp_path, home):
    artifact = quantized(decoder, [text for text in TEXT if len(text) > 20][:40])
    report = json.loads((artifact.path / stage.REPORT).read_bytes())
    assert report["multiply_adds"]["share"] > 0.9
    assert report["accuracy"]["cosine"] > 0.95  # random weights, and no budget
    verdict = validate_model(artifact, effort="quick")
    assert verdict.passed, verdict.summary
    assert verdict.generation.agreement > 0.5  # of a vocabulary of hundreds
    with load_model(artifact) as model:
        (found,) = model.generate([TEXT[0]], max_new_tokens=8)
    assert len(found.tokens) == 8


def test_texts_without_two_tokens_are_an_error(decoder, quantized):
    with pytest.raises(InputError, match="no calibration text has two tokens"):
        quantized(decoder, ["a", "b"])


@pytest.mark.slow
def test_engine_of_a_quantized_decoder_takes_prompts_and_steps(decoder, quantized):
    artifact = quantized(decoder, TEXT[:24], capability=("8.9",))
    (trial,) = json.loads((artifact.path / stage.REPORT).read_bytes())["engines"]
    assert not trial["not_quantized"]
    assert "past_sequence=0:" in trial["profiles"][0]
