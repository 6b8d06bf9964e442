"""Decoders that are exported without Optimum have Optimum's interface, and generate as PyTorch."""

import pytest

from enginery import export_model, load_model, validate_model
from enginery.core.errors import ExportError
from enginery.core.versions import TRANSFORMERS5, transformers_family
from tests.runtime.generation.test_generator import TEXTS
from tests.tiny import save_tiny, with_more
from tests.tiny_generators import reference_tokens

pytestmark = pytest.mark.skipif(
    transformers_family() != TRANSFORMERS5, reason="this exporter is that of transformers 5"
)

KINDS = ("gpt2", "llama", "qwen3", "gemma3_text", "mistral", "gpt_neox", "phi")
CASES = {"greedy": {}, "beams": {"num_beams": 4}, "no repetition": {"repetition_penalty": 1.5}}


@pytest.mark.parametrize("kind", with_more(KINDS, "gpt2", "gemma3_text"))
def test_tokens_are_those_of_pytorch_alone_and_in_a_padded_batch(tiny_model, home, kind):
    # Texts of several lengths are padded on the left, and the longest passes a sliding window of 8.
    source = tiny_model(kind, "text-generation")
    with load_model(export_model(str(source))) as model:
        for name, case in CASES.items():
            options = {"max_new_tokens": 20, **case}
            tokens, *_ = reference_tokens(source, TEXTS, **options)
            together = [result.tokens for result in model.generate(TEXTS, **options)]
            alone = [result.tokens for result in model.generate(TEXTS, batch_size=1, **options)]
            assert len({tuple(row) for row in tokens}) == len(TEXTS)
            assert [list(row) for row in together] == tokens, name
            assert [list(row) for row in alone] == tokens, name


def test_graph_has_the_names_and_dims_of_optimum(tiny_model, home):
    (graph,) = export_model(str(tiny_model("gpt2", "text-generation"))).manifest.graphs
    past, both = ("batch", 4, "past_sequence", 8), ("batch", 4, "past_sequence + sequence", 8)
    parts = [f"{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
    assert graph.file == "model.onnx"
    assert [(spec.name, spec.dims) for spec in graph.inputs] == [
        ("input_ids", ("batch", "sequence")),
        *((f"past_key_values.{part}", past) for part in parts),
        ("attention_mask", ("batch", "past_sequence + sequence")),
        ("position_ids", ("batch", "sequence")),
    ]
    assert [(spec.name, spec.dims) for spec in graph.outputs[1:]] == [
        (f"present.{part}", both) for part in parts
    ]
    assert graph.outputs[0].name == "logits"
    assert graph.outputs[0].dims[:2] == ("batch", 1)


@pytest.mark.more
@pytest.mark.parametrize("kind", ["gpt2", "gemma3_text"])
def test_validation_compares_the_tokens(tiny_model, home, kind):
    report = validate_model(export_model(str(tiny_model(kind, "text-generation"))), force=True)
    assert report.passed
    assert report.generation.equal == report.generation.beams_equal == report.generation.inputs


def test_recurrent_state_is_refused_by_name(tmp_path, home):
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4, vocab_size=50)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    with pytest.raises(ExportError, match=r"mamba's cache has a LinearAttentionLayer") as error:
        export_model(str(tmp_path / "mamba"))
    assert "--task text-generation" in error.value.do


@pytest.mark.more
def test_window_and_positions_are_the_models_own(tmp_path, home):
    # A window of 3 positions, which the example that is traced is longer than.
    source = save_tiny("mistral", "text-generation", tmp_path / "m", sliding_window=3)
    tokens, *_ = reference_tokens(source, TEXTS, max_new_tokens=12)
    with load_model(export_model(str(source))) as model:
        results = model.generate(TEXTS, max_new_tokens=12)
    assert [list(result.tokens) for result in results] == tokens
