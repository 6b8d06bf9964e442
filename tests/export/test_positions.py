"""Models that do something else beyond a length have a limit, which load_model enforces."""

import numpy as np
import pytest
import transformers

from enginery import export_model, load_model, validate_model
from enginery.core.errors import InputError
from enginery.core.model.files import ModelConfig
from enginery.export.positions import find_length_limit
from enginery.runtime.tasks.tensors import Tensors
from enginery.runtime.tasks.text import TooLongError
from tests.runtime.pytorch.test_state import COMMON, LONG
from tests.tiny import save_tiny

SMALL = {**COMMON, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (transformers.BigBirdConfig(**SMALL, block_size=4, num_random_blocks=1), 28),
        (transformers.BigBirdConfig(**SMALL, block_size=16, num_random_blocks=3), 176),
        (transformers.BigBirdConfig(**SMALL, attention_type="original_full"), None),
        (transformers.BigBirdConfig(**SMALL, block_size=128, num_random_blocks=3), None),
        (
            transformers.Phi3Config(
                **SMALL, original_max_position_embeddings=100, rope_scaling=LONG
            ),
            100,
        ),
        (transformers.Phi3Config(**SMALL), None),
        (transformers.LlamaConfig(**SMALL, rope_scaling={"type": "dynamic", "factor": 4.0}), None),
        (
            transformers.LlamaConfig(
                **SMALL,
                rope_scaling={
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 64,
                    **{k: v for k, v in LONG.items() if k != "type"},
                    "factor": 8.0,
                },
                original_max_position_embeddings=64,
            ),
            64,
        ),
        (transformers.BertConfig(**SMALL), None),
        (
            transformers.BigBirdPegasusConfig(
                vocab_size=100,
                d_model=32,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=32,
                decoder_ffn_dim=32,
                max_position_embeddings=512,
                block_size=4,
                num_random_blocks=1,
            ),
            28,
        ),
    ],
)
def test_limit_is_where_the_model_changes(config, limit):
    model = transformers.AutoModel.from_config(config)
    settings = ModelConfig.model_validate(config.to_dict())
    found, notes = find_length_limit(model, settings)
    assert found == limit
    assert len(notes) == (limit is not None)


@pytest.fixture
def phi3(tmp_path, home):
    """Return a classifier with LongRoPE: 24 positions of 128."""
    source = save_tiny(
        "phi3",
        "text-classification",
        tmp_path / "phi3",
        original_max_position_embeddings=24,
        rope_scaling=LONG,
    )
    return export_model(str(source))


@pytest.mark.more
def test_longer_texts_are_refused_and_not_cut(phi3):
    assert phi3.manifest.length_limit == 24
    assert validate_model(phi3).passed
    with load_model(phi3) as model:
        assert any("refused above 24 tokens" in note for note in model.notes)
        assert len(model.classify(["a b"])) == 1
        with pytest.raises(TooLongError, match=r"input 1 is too long: expected at most 24 tokens"):
            model.classify(["a b", "a b c d e f " * 20])
        (cut,) = model.classify(["a b c d e f " * 20], truncate=True)
        assert cut.labels


@pytest.mark.more
def test_tensors_that_are_too_long_are_refused(phi3):
    task = Tensors.open(phi3, phi3.manifest.graphs[0])
    arrays = {
        spec.name: np.ones((1, 25), dtype=spec.dtype) for spec in phi3.manifest.graphs[0].inputs
    }
    with pytest.raises(InputError, match="takes at most 24"):
        task.preprocess(arrays, None)
