"""A model is as it was loaded before each input."""

import pytest
import torch
import transformers

from enginery.core.errors import ExportError
from enginery.runtime.pytorch.state import ModelState
from tests.validate.faults.reference import CHANGES

COMMON = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.3,
    "pad_token_id": 1,
}
LONG = {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.5], "type": "longrope"}


def big_bird():
    config = transformers.BigBirdConfig(
        **COMMON, max_position_embeddings=256, block_size=4, num_random_blocks=1
    )
    return transformers.BigBirdModel(config)


def phi3():
    config = transformers.Phi3Config(
        **COMMON,
        num_key_value_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_scaling=LONG,
    )
    return transformers.Phi3Model(config)


def dynamic_llama():
    config = transformers.LlamaConfig(
        **COMMON, max_position_embeddings=64, rope_scaling={"type": "dynamic", "factor": 4.0}
    )
    return transformers.LlamaModel(config)


def bert():
    return transformers.BertModel(transformers.BertConfig(**COMMON))


class Counts(torch.nn.Module):
    """A model that answers with what it keeps in every place that a module has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.count, self.lengths, self.cache = 0, [], {}
        self.part = torch.nn.Linear(3, 3)

    def forward(self, x):
        answer = x + self.total + self.count + len(self.lengths) + len(self.cache)
        answer = answer + float(isinstance(self.part, torch.nn.Identity))
        self.total += 1
        self.count += 1000
        self.lengths.append(len(x))
        self.cache[len(self.cache)] = x
        self.part = torch.nn.Identity()
        self.more = x
        return answer


def answers(model, lengths, *, fresh):
    """Return a model's states for some lengths, each after `ModelState.restore` or not."""
    state = ModelState(model)
    generator = torch.Generator().manual_seed(0)
    everything = torch.randint(2, 100, (1, 256), generator=generator)
    states = []
    for length in lengths:
        if fresh:
            state.restore()
        with torch.inference_mode():
            states.append(model(everything[:, :length]).last_hidden_state[0, :8].clone())
    return states, state


@pytest.mark.parametrize("make", [big_bird, phi3, dynamic_llama])
def test_answer_does_not_depend_on_the_inputs_before(make):
    torch.manual_seed(0)
    model = make().eval()
    lengths = (200, 16, 200, 100, 16)
    (first, *_), _ = answers(make_again(model), (200,), fresh=True)
    states, state = answers(model, lengths, fresh=True)
    for length, one in zip(lengths, states, strict=True):
        (alone, *_), _ = answers(make_again(model), (length,), fresh=True)
        torch.testing.assert_close(one, alone, rtol=0, atol=0)
    torch.testing.assert_close(states[2], first, rtol=0, atol=0)
    state.restore()
    assert "put back before each input" in state.describe()


def make_again(model):
    """Return a new model with the weights of another one."""
    new = type(model)(transformers.AutoConfig.for_model(**model.config.to_dict())).eval()
    new.load_state_dict(model.state_dict())
    return new


def test_without_it_big_bird_answers_otherwise_after_a_short_text():
    torch.manual_seed(0)
    (before, _, after), _ = answers(big_bird().eval(), (200, 16, 200), fresh=False)
    assert (before - after).abs().max() > 1e-2


def test_every_kind_of_state_is_put_back():
    model = Counts().eval()
    state = ModelState(model)
    x = torch.ones(3)
    for _ in range(3):
        state.restore()
        with torch.inference_mode():
            assert torch.equal(model(x), x)
    state.restore()
    assert not hasattr(model, "more")
    assert (model.count, model.lengths, model.cache) == (0, [], {})
    assert set(state.changed) >= {"total", "count", "lengths", "cache", "part", "more"}


def test_model_that_keeps_its_state_has_no_note():
    model = bert().eval()
    _, state = answers(model, (16, 60, 16), fresh=True)
    state.restore()
    assert state.describe() == ""


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_next_answer_is_undone(name):
    torch.manual_seed(0)
    model = bert().eval()
    state = ModelState(model)
    ids = torch.randint(2, 100, (1, 12), generator=torch.Generator().manual_seed(0))

    def answer():
        with torch.inference_mode():
            return model(ids).last_hidden_state.clone()

    expected = answer()
    state.restore()
    with torch.inference_mode():
        CHANGES[name](model)
    assert (answer() - expected).abs().max() > 1e-2, "a fault without an effect proves nothing"
    state.restore()
    assert torch.equal(answer(), expected)
    assert state.describe()


def test_model_that_writes_into_its_weights_is_no_reference():
    model = bert().eval()
    state = ModelState(model)
    with torch.inference_mode():
        model.pooler.dense.bias.add_(1)
    with pytest.raises(ExportError, match=r"changes its weight pooler\.dense\.bias"):
        state.restore()


def test_hidden_states_are_recorded_once_each():
    """transformers 5 installs hooks for them in the first run, and remembers that it has."""
    model = bert().eval()
    state = ModelState(model)
    for _ in range(3):
        state.restore()
        with torch.inference_mode():
            states = model(torch.ones(1, 4, dtype=torch.long), output_hidden_states=True)
        assert len(states.hidden_states) == model.config.num_hidden_layers + 1
    assert not state.describe()
