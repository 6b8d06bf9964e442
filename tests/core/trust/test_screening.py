import json
import os
import tracemalloc

import pytest

from enginery.core.errors import SourceError, UntrustedModelError
from enginery.core.trust.screening import screen_model

KNOWN = ("bert", "lightglue", "clip")


@pytest.fixture
def model(tmp_path):
    """`model({"config.json": {...}})`: a directory with these JSON files."""

    def make(files):
        directory = tmp_path / "model"
        for name, content in {"config.json": {"model_type": "bert"}, **files}.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(json.dumps(content))
        return directory

    return make


def screen(directory, **options):
    screen_model(directory, known_types=KNOWN, **options)


NESTED = {"auto_map": {"AutoConfig": "evil.Config"}}

REFUSED = {
    "own type": ({"config.json": {"model_type": "mine", **NESTED}}, "config.json: auto_map"),
    "no type": ({"config.json": NESTED}, "config.json: auto_map"),
    "nested": (
        {"config.json": {"model_type": "bert", "text_config": NESTED}},
        "config.json: text_config.auto_map",
    ),
    "in a list": (
        {"config.json": {"model_type": "bert", "parts": [{"deep": NESTED}]}},
        r"config.json: parts\[0\].deep.auto_map",
    ),
    "trust": (
        {"config.json": {"model_type": "lightglue", "trust_remote_code": True}},
        "config.json: trust_remote_code is True",
    ),
    "trust in the tokenizer": (
        {"tokenizer_config.json": {"trust_remote_code": 1}},
        "tokenizer_config.json: trust_remote_code is 1",
    ),
    "pipelines": (
        {"config.json": {"model_type": "bert", "custom_pipelines": {"x": {"impl": "e.Pipe"}}}},
        "custom_pipelines names Python code",
    ),
    "attention": (
        {"config.json": {"model_type": "bert", "_attn_implementation": "org/kernel"}},
        "_attn_implementation is 'org/kernel'",
    ),
    "attention, internal": (
        {"config.json": {"model_type": "bert", "_attn_implementation_internal": "org/k@main:f"}},
        "_attn_implementation_internal is 'org/k@main:f'",
    ),
    "attention of a part": (
        {"config.json": {"model_type": "clip", "attn_implementation": {"vision": "org/k"}}},
        "attn_implementation is 'org/k'",
    ),
    "experts": (
        {"config.json": {"model_type": "bert", "_experts_implementation": "org/k"}},
        "_experts_implementation is 'org/k'",
    ),
    "kernels": (
        {"config.json": {"model_type": "clip", "text_config": {"use_kernels": True}}},
        "text_config.use_kernels is True",
    ),
    "mapping of kernels": (
        {"config.json": {"model_type": "bert", "kernel_config": {"RMSNorm": "org/k:RMSNorm"}}},
        "kernel_config is .*must not name code of the Hub",
    ),
    "template up": (
        {"tokenizer_config.json": {"chat_template": [{"name": "../../x", "template": ""}]}},
        r"chat_template has the name '\.\./\.\./x'",
    ),
    "template elsewhere": (
        {"processor_config.json": {"chat_template": {"default": "", "/etc/x": ""}}},
        "chat_template has the name '/etc/x'",
    ),
    "template of Windows": (
        {"chat_template.json": {"chat_template": {"..\\x": ""}}},
        "chat_template has the name",
    ),
    "code of a part of a processor": (
        {"processor_config.json": {"image_processor": NESTED}},
        "processor_config.json: image_processor.auto_map",
    ),
    "nested path": (
        {"config.json": {"model_type": "lightglue", "detector": {"_name_or_path": "/srv/evil"}}},
        "detector._name_or_path is '/srv/evil', which leads out",
    ),
    "nested path up": (
        {"config.json": {"model_type": "lightglue", "detector": {"_name_or_path": "../evil"}}},
        "leads out",
    ),
    "file": (
        {"tokenizer_config.json": {"vocab_file": "/etc/passwd"}},
        "vocab_file is '/etc/passwd'",
    ),
    "file up": (
        {"tokenizer_config.json": {"vocab_file": "../../../../../../../etc/passwd"}},
        "vocab_file is",
    ),
    "sentencepiece model": (
        {"tokenizer_config.json": {"source_spm": "/etc/passwd"}},
        "source_spm is '/etc/passwd'",
    ),
    "vocabulary": ({"tokenizer_config.json": {"vocab": "/etc/passwd"}}, "vocab is '/etc/passwd'"),
    "adapter": (
        {"adapter_config.json": {"base_model_name_or_path": "evil/base"}},
        "an adapter of another model, 'evil/base'",
    ),
    "modules": (
        {"modules.json": [{"idx": 0, "path": "", "type": "custom_st.Transformer"}]},
        r"\[0\].type is 'custom_st.Transformer'",
    ),
    "modules elsewhere": (
        {"modules.json": [{"path": "../../x", "type": "sentence_transformers.models.Pooling"}]},
        r"\[0\].path is '../../x'",
    ),
    "modules of another shape": ({"modules.json": ["evil"]}, "type is 'evil'"),
    "for one version": (
        {"config.4.0.0.json": {"model_type": "mine", **NESTED}},
        "config.4.0.0.json: auto_map",
    ),
    "trust for one version": (
        {"vision/config.4.0.json": {"trust_remote_code": True}},
        "config.4.0.json: trust_remote_code is True",
    ),
    "switch": (
        {"config.json": {"model_type": "bert", "configuration_files": ["config.4.0.0.json"]}},
        "config.json: configuration_files names other files",
    ),
    "switch of a tokenizer": (
        {"tokenizer_config.json": {"fast_tokenizer_files": ["../../tokenizer.4.0.0.json"]}},
        "tokenizer_config.json: fast_tokenizer_files names other files",
    ),
    "audio tokenizer": (
        {"audio_tokenizer_config.json": {"audio_tokenizer_name_or_path": "/srv/evil"}},
        "audio_tokenizer_name_or_path is '/srv/evil'",
    ),
    "in a folder": (
        {"vision/config.json": {"model_type": "mine", **NESTED}},
        "vision/config.json: auto_map",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_untrusted_settings_are_rejected_with_file_and_key(model, case):
    files, said = REFUSED[case]
    directory = model(files)
    with pytest.raises(UntrustedModelError, match=said):
        screen(directory)
    screen(directory, trust_remote_code=True)


HARMLESS = {
    "native class": {"config.json": {"model_type": "bert", **NESTED}},
    "native tokenizer": {"tokenizer_config.json": NESTED},
    "labels": {"config.json": {"model_type": "bert", "label2id": {"auto_map": 0}}},
    "no trust": {"config.json": {"model_type": "lightglue", "trust_remote_code": False}},
    "attention": {"config.json": {"model_type": "bert", "_attn_implementation": "sdpa"}},
    "attentions": {
        "config.json": {"model_type": "clip", "_attn_implementation": {"": "eager", "text": None}}
    },
    "attention of transformers 5": {
        "config.json": {"model_type": "bert", "_attn_implementation": "flash_attention_4"}
    },
    "experts": {"config.json": {"model_type": "bert", "_experts_implementation": "batched_mm"}},
    "no kernels": {"config.json": {"model_type": "bert", "use_kernels": False}},
    "templates": {
        "tokenizer_config.json": {
            "chat_template": [{"name": "tool_use", "template": "{{ 1 }}"}, {"name": "rag-v1.0"}]
        },
        "chat_template.json": {"chat_template": "{{ messages }}"},
    },
    "where it was saved": {"config.json": {"model_type": "bert", "_name_or_path": "/home/x/ckpt"}},
    "a part's id": {"config.json": {"model_type": "clip", "text": {"_name_or_path": "org/bert"}}},
    "old path": {"tokenizer_config.json": {"tokenizer_file": "/home/x/.cache/none/t.json"}},
    "labels of files": {
        "config.json": {"model_type": "bert", "label2id": {"configuration_files": 1}}
    },
    "no switch": {"config.json": {"model_type": "bert", "configuration_files": []}},
    "old settings": {"config.4.0.0.json": {"model_type": "bert", **NESTED}},
    "no file's name": {"tokenizer_config.json": {"vocab_file": "/" + 5000 * "a"}},
    "vocabulary": {"vocab.json": {"auto_map": 1, "trust_remote_code": 2}},
    "notes": {"training_config.json": {"trust_remote_code": True}},
    "modules": {
        "modules.json": [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    },
}


@pytest.mark.parametrize("case", HARMLESS)
def test_settings_of_real_models_pass(model, case):
    screen(model(HARMLESS[case]))


def test_side_file_that_links_out_is_rejected(model, tmp_path):
    directory = model({})
    (tmp_path / "secret.txt").write_text("secret")
    (directory / "vocab.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UntrustedModelError, match=r"vocab\.txt is a link to .*secret\.txt"):
        screen(directory)


def test_folder_that_links_out_is_rejected(model, tmp_path):
    directory = model({})
    (tmp_path / "other").mkdir()
    (directory / "1_Pooling").symlink_to(tmp_path / "other")
    with pytest.raises(UntrustedModelError, match="1_Pooling is a link"):
        screen(directory)


def test_links_of_the_hubs_cache_and_of_weights_are_followed(model, tmp_path):
    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "abc").write_text('{"model_type": "bert"}')
    snapshot = repository / "snapshots" / "f00"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    (tmp_path / "weights.safetensors").write_text("")
    (snapshot / "model.safetensors").symlink_to(tmp_path / "weights.safetensors")
    screen(snapshot)


def test_deep_nesting_is_an_error_in_words(model):
    directory = model({})
    deep = "[" * 100_000 + "]" * 100_000
    (directory / "config.json").write_text('{"model_type": "bert", "x": ' + deep + "}")
    with pytest.raises(SourceError, match="nested too deeply"):
        screen(directory)


@pytest.mark.parametrize("kind", [{}, [], {"a": "bert"}, 3, None])
def test_a_type_that_is_no_name_is_of_no_class(model, kind):
    with pytest.raises(UntrustedModelError, match="auto_map"):
        screen_model(
            model({"config.json": {"model_type": kind, **NESTED}}), known_types={"bert": object}
        )


@pytest.mark.parametrize("content", [b"{", b"\xff", b""])
def test_a_configuration_that_is_no_json_is_named(model, content):
    directory = model({})
    (directory / "config.json").write_bytes(content)
    with pytest.raises(SourceError, match=r"config\.json is not valid JSON"):
        screen(directory)


def test_named_pipe_is_rejected_before_a_loader_blocks(model):
    directory = model({})
    os.mkfifo(directory / "vocab.txt")
    with pytest.raises(UntrustedModelError, match=r"vocab\.txt is a named pipe"):
        screen(directory)
    (directory / "vocab.txt").unlink()
    (directory / "model.bin").symlink_to("/dev/zero")
    with pytest.raises(UntrustedModelError, match=r"model\.bin is a named pipe, a socket or a dev"):
        screen(directory)


def test_a_configuration_that_is_too_large_to_be_screened_is_rejected(model):
    directory = model({"part/config.json": NESTED})
    with (directory / "part" / "config.json").open("r+b") as stream:
        stream.truncate(2**26 + 1)
    with pytest.raises(SourceError, match=r"part/config\.json cannot be read: it has more than 64"):
        screen(directory)


def test_long_keys_above_many_elements_are_not_repeated_for_each(model):
    document = {"model_type": "bert", "k" * 200_000: [{"a": [0] * 100}] * 3_000}
    document["last"] = {"x" * 1_000: NESTED}
    directory = model({"config.json": document})
    tracemalloc.start()
    try:
        with pytest.raises(
            UntrustedModelError, match=r": …x+\.auto_map names Python code"
        ) as found:
            screen(directory)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(str(found.value)) < 2_000
    assert most < 50e6


@pytest.mark.parametrize("name", ["vocab.txt", "chat_template.jinja", "config.4.0.0.json"])
def test_link_to_itself_is_rejected(model, name):
    directory = model({})
    (directory / name).symlink_to(name)
    with pytest.raises(UntrustedModelError, match="is a link"):
        screen(directory)


def test_the_folder_of_chat_templates_may_not_be_elsewhere(model, tmp_path):
    directory = model({})
    (tmp_path / "secret.jinja").write_text("secret")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "x.jinja").symlink_to(tmp_path / "secret.jinja")
    with pytest.raises(UntrustedModelError, match=r"x\.jinja is a link"):
        screen(directory)


def test_settings_for_one_version_are_found_as_transformers_finds_them():
    """Where this fails, transformers looks for other names, and the screening has to, too."""
    configuration = pytest.importorskip("transformers.configuration_utils")
    tokenization = pytest.importorskip("transformers.tokenization_utils_base")
    assert configuration.get_configuration_file(["config.4.0.0.json"]) == "config.4.0.0.json"
    assert tokenization.get_fast_tokenizer_file(["tokenizer.4.0.0.json"]) == "tokenizer.4.0.0.json"
