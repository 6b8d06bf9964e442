"""config.json of transformers 5, read by version 4: translated, refused or noted."""

import json
import math

import pytest
import torch
import transformers

from enginery.core.errors import SourceError
from enginery.runtime.pytorch.config import is_newer, load_config, translate
from enginery.runtime.pytorch.runner import load_pytorch
from tests.transformers5.models import ANSWERS, answers, auto_class, set_weights

SAVED = json.loads(ANSWERS.read_text(encoding="utf-8"))["cases"]
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "transformers_version": "5.24.0",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 48,
    "vocab_size": 32,
}


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny steps take longer if they are shared among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write(directory, document):
    (directory / "config.json").write_text(json.dumps(document), encoding="utf-8")
    return directory


def load(directory, document):
    return load_config(write(directory, document), trust_remote_code=False)


def rope(**parameters):
    return {**LLAMA, "rope_parameters": {"rope_type": "default", **parameters}}


# -- answers that transformers 5 gave -------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize("name", SAVED)
def test_answers_equal_those_of_transformers_5(name, tmp_path):
    case = SAVED[name]
    config = load(tmp_path, case["config"]).config
    model = auto_class(config).from_config(config)
    set_weights(model)
    model.save_pretrained(tmp_path)
    write(tmp_path, case["config"])
    task = "text-generation" if "ForCausalLM" in case["class"] else "fill-mask"
    loaded = load_pytorch(tmp_path, task)
    assert not loaded.untrained_weights
    result = answers(loaded)
    expected = torch.tensor(case["logits"])
    difference = (torch.tensor(result["logits"]) - expected).abs().max() / expected.std()
    assert difference < 1e-4
    assert result.get("tokens") == case.get("tokens")


def test_stored_answers_depend_on_the_positions(tmp_path):
    """Without the translation 4.57 computes others: the comparison above can fail."""
    case = SAVED["llama llama3"]
    unread = {**case["config"], "transformers_version": "4.57.6", "rope_theta": 10_000.0}
    config = load(tmp_path, unread).config
    model = auto_class(config).from_config(config)
    set_weights(model)
    assert answers(model)["tokens"] != case["tokens"]


# -- which files are translated -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "has_theta", "expected"),
    [
        ("5.24.0", True, True),
        ("6.0.0", False, True),
        ("4.57.6", True, False),
        ("4.57.6", False, True),  # version 4 always writes the base
        (None, False, True),
    ],
)
def test_files_of_newer_versions_are_translated(version, has_theta, expected):
    document = rope(rope_theta=100.0) | {"transformers_version": version}
    if has_theta:
        document["rope_theta"] = 10_000.0
    assert is_newer(document) is expected


def test_files_of_this_version_are_read_unchanged(tmp_path):
    document = {**LLAMA, "transformers_version": "4.57.6", "rope_theta": 77.0, "extra": 1}
    loaded = load(tmp_path, document)
    assert (loaded.is_newer, loaded.notes) == (False, ())
    plain = transformers.AutoConfig.from_pretrained(str(tmp_path))
    assert loaded.config.to_dict() == plain.to_dict()


def test_note_says_what_was_translated(tmp_path):
    loaded = load(tmp_path, rope(rope_theta=100.0))
    assert loaded.config.rope_theta == 100.0
    assert loaded.notes == (
        "config.json of transformers 5.24.0 was translated: rope_parameters → rope_theta 100.0",
    )
    # A reader with version 5 finds its own key in what is written.
    assert loaded.config.to_dict()["rope_parameters"]["rope_theta"] == 100.0


def test_parameters_win_over_a_base_beside_them(tmp_path):
    config = load(tmp_path, rope(rope_theta=100.0) | {"rope_theta": 10_000.0}).config
    assert config.rope_theta == 100.0


# -- positions ------------------------------------------------------------------------------------


def test_parts_of_a_config_are_translated(tmp_path):
    text = rope(rope_theta=100.0)
    document = {
        "model_type": "llava",
        "transformers_version": "5.24.0",
        "text_config": {k: v for k, v in text.items() if k != "transformers_version"},
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 16},
    }
    assert load(tmp_path, document).config.text_config.rope_theta == 100.0


def test_longrope_keeps_the_factor_of_attention():
    document = rope() | {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 77.0,
            "factor": 3.0,
            "original_max_position_embeddings": 12,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        }
    }
    translated = translate(document).document
    assert translated["original_max_position_embeddings"] == 12
    assert translated["rope_scaling"]["attention_factor"] == pytest.approx(
        math.sqrt(1 + math.log(3) / math.log(12))
    )


@pytest.mark.parametrize(
    ("document", "key"),
    [
        (rope(rope_type="proportional"), "rope_parameters"),
        (rope(rope_theta=77.0, partial_rotary_factor=0.5), "rope_parameters.partial_rotary_factor"),
        (rope(rope_theta=77.0, mystery=1), "rope_parameters"),
        ({**LLAMA, "rope_parameters": {"full_attention": {}, "chunked_attention": {}}}, "rope"),
        ({**LLAMA, "rope_parameters": 3}, "rope_parameters"),
        (
            {
                **LLAMA,
                "rope_parameters": {
                    "full_attention": {"rope_theta": 5.0},
                    "sliding_attention": {"rope_theta": 6.0},
                },
            },
            "rope_parameters",
        ),
        (
            {"model_type": "modernbert", "layer_types": ["sliding_attention", "full_attention"]},
            "layer_types",
        ),
        ({**rope(rope_theta=77.0), "model_type": "no_such_type"}, "rope_parameters"),
        ({"model_type": "zamba2", "layers_block_type": ["linear_attention"]}, "layers_block_type"),
        ({"model_type": "detr", "backbone_config": {"model_type": "timm_backbone"}}, "backbone"),
    ],
)
def test_settings_that_version_4_cannot_express_are_refused(document, key):
    with pytest.raises(SourceError, match=rf"config.json sets {key}.*cannot express"):
        translate(document)


@pytest.mark.parametrize("theta", ["1e4", -1, None, True, float("nan"), float("inf")])
def test_base_that_is_no_positive_number_is_an_error(theta):
    with pytest.raises(SourceError, match=r"rope_theta of llama is .* expected a positive number"):
        translate(rope(rope_theta=theta))


def test_keys_of_gpt_neox_have_other_names(tmp_path):
    document = {
        "model_type": "gpt_neox",
        "transformers_version": "5.24.0",
        "rope_parameters": {
            "rope_type": "linear",
            "factor": 2.0,
            "rope_theta": 77.0,
            "partial_rotary_factor": 0.5,
        },
    }
    config = load(tmp_path, document).config
    assert (config.rotary_emb_base, config.rotary_pct) == (77.0, 0.5)
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_default_positions_replace_a_scaling_that_is_the_types_default(tmp_path):
    document = {**rope(rope_theta=77.0), "model_type": "gpt_oss", "num_hidden_layers": 2}
    assert transformers.GptOssConfig().rope_scaling is not None
    assert load(tmp_path, document).config.rope_scaling is None


def test_type_that_was_never_compared_may_have_its_own_default():
    default = {"rope_type": "axial", "rope_theta": 10_000.0}
    part = {"model_type": "pixtral", "rope_parameters": default}
    assert translate(part).document == part
    with pytest.raises(SourceError, match="cannot express for pixtral"):
        translate({**part, "rope_parameters": {**default, "rope_theta": 5.0}})


# -- other settings -------------------------------------------------------------------------------


def test_infinity_is_a_number(tmp_path):
    document = {
        "model_type": "mamba2",
        "transformers_version": "5.24.0",
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    }
    assert list(load(tmp_path, document).config.time_step_limit) == [0.0, math.inf]


def test_layers_of_modernbert_keep_their_kinds():
    layers = ["full_attention", "sliding_attention"] * 2
    translated = translate({"model_type": "modernbert", "layer_types": layers}).document
    assert translated["global_attn_every_n_layers"] == 2


def test_backbone_of_a_detector_is_its_own(tmp_path):
    document = {
        "model_type": "detr",
        "transformers_version": "5.24.0",
        "backbone_config": {"model_type": "resnet", "out_features": ["stage4"]},
    }
    config = load(tmp_path, document).config
    assert (config.use_timm_backbone, config.backbone_config.model_type) == (False, "resnet")


# -- keys that nobody reads -----------------------------------------------------------------------


def test_key_of_version_5_that_changes_answers_is_refused(tmp_path):
    document = {"model_type": "gemma", "transformers_version": "5.24.0", "pad_token_id": 0}
    load(tmp_path, {**document, "use_bidirectional_attention": None})
    with pytest.raises(SourceError, match=r"use_bidirectional_attention to true.*for gemma"):
        load(tmp_path, {**document, "use_bidirectional_attention": True})


def test_keys_without_effect_are_noted(tmp_path):
    document = {**LLAMA, "my_note": "trained on pumps"}
    assert load(tmp_path, document).notes == (
        "config.json of transformers 5.24.0 has keys that are not read: my_note",
    )


def test_unknown_key_of_an_unknown_version_is_refused(tmp_path):
    with pytest.raises(SourceError, match="query_scale to 2"):
        load(tmp_path, {**LLAMA, "transformers_version": "5.99.0", "query_scale": 2})


def test_configuration_of_trusted_code_reads_the_file_itself(tmp_path):
    code = (
        "from transformers import PretrainedConfig\n"
        "class OwnConfig(PretrainedConfig):\n"
        "    model_type = 'own-rotary'\n"
    )
    (tmp_path / "configuration_own.py").write_text(code)
    document = {
        **rope(rope_theta=100.0),
        "model_type": "own-rotary",
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig"},
    }
    write(tmp_path, document)
    loaded = load_config(tmp_path, trust_remote_code=True)
    assert loaded.config.rope_parameters == document["rope_parameters"]
    assert "read by the model's own code" in loaded.notes[0]
    with pytest.raises(SourceError, match="cannot express for own-rotary"):
        load_config(tmp_path, trust_remote_code=False)
