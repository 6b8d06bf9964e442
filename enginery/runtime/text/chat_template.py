"""Render a model's chat template: the prompt that it was trained on, from messages.

    template = ChatTemplate.open(directory)
    template.render([{"role": "user", "content": "Is it warm?"}], add_generation_prompt=True)

A template is a Jinja document in `chat_template.jinja` or `tokenizer_config.json`. It comes with
the model, so it runs in Jinja's sandbox, as in transformers, with bounds on what it can build.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from enginery.core.errors import ArtifactError
from enginery.core.json_file import read_document
from enginery.core.model.files import (
    SentenceBertConfig,
    SentenceTransformersConfig,
    TokenizerConfig,
    module_kinds,
)
from enginery.runtime.text.tokenizer_files import TokenizerFiles

FILE = "chat_template.jinja"

Message = Mapping[str, Any]
"""`role` and `content`, as OpenAI's API has them."""

_MAX_BYTES = 2**20
"""Size of the largest template that is read; published ones have up to 20 kB."""
_MAX_REPEATED = 2**16
"""Largest result of a multiplication, and largest range, in a template."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of one model."""

    text: str
    file: Path
    """The file that it comes from, for messages."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Variables such as `eos_token`."""

    @classmethod
    def open(cls, directory: Path) -> ChatTemplate | None:
        """Read the template of a model's directory; None if it has none.

        Raises:
            ArtifactError: a file cannot be read.
        """
        files = TokenizerFiles.read(directory)
        file, text = directory / FILE, files.settings.default_chat_template
        if file.exists():
            try:
                text = read_document(file, max_bytes=_MAX_BYTES).decode()
            except OSError as error:
                raise ArtifactError(f"{file} cannot be read: {error.strerror}.") from error
            except UnicodeDecodeError as error:
                raise ArtifactError(f"{file} is not UTF-8: {error}.") from error
        else:
            file = directory / TokenizerConfig.FILE
        if not text:
            return None
        tokens = {role: token for role, token in files.special.model_dump().items() if token}
        return cls(text, file, tokens)

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """Return the prompt for messages.

        Args:
            messages: the messages, oldest first.
            variables: further variables of the template, such as `add_generation_prompt`.

        Raises:
            ArtifactError: the template is invalid, or rejects the messages.
        """
        import jinja2

        try:
            rendered: str = self.compiled.render(
                messages=messages, **{**self.special_tokens, **variables}
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"the chat template in {self.file} fails on these messages: {_clause(error)}."
            ) from error
        return rendered

    @cached_property
    def compiled(self) -> Any:
        """The compiled Jinja template.

        Raises:
            ArtifactError: the template is invalid.
        """
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Environment(ImmutableSandboxedEnvironment):
            """Jinja's sandbox, where no operator builds gigabytes."""

            intercepted_binops = frozenset(("*", "**"))

            def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
                # `"a" * 10**9` and powers allocate before the sandbox can see the result.
                sizes = [len(x) if hasattr(x, "__len__") else abs(x) for x in (left, right)]
                if operator == "**" or sizes[0] * sizes[1] > _MAX_REPEATED:
                    raise jinja2.exceptions.SecurityError(f"{operator} is limited")
                return super().call_binop(context, operator, left, right)

        class GenerationTag(jinja2.ext.Extension):
            """Renders `{% generation %}`, which marks a model's own words for training."""

            tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                # What is set in the block is not set behind it, as in transformers.
                return jinja2.nodes.Scope(body, lineno=line)

        # Jinja's own filter escapes `<` and `&` for HTML, which models were not trained on.
        def to_json(
            value: Any,
            ensure_ascii: bool = False,  # as transformers' filter
            indent: int | None = None,
            separators: tuple[str, str] | None = None,
            sort_keys: bool = False,
        ) -> str:
            return json.dumps(
                value,
                ensure_ascii=ensure_ascii,
                indent=indent,
                separators=separators,
                sort_keys=sort_keys,
            )

        def strftime_now(pattern: str) -> str:
            return datetime.now().strftime(pattern)  # as transformers does

        def limited_range(*bounds: int) -> range:
            values = range(*bounds)
            if len(values) > _MAX_REPEATED:
                raise jinja2.exceptions.SecurityError("a range is too long")
            return values

        def reject(message: str) -> NoReturn:
            raise jinja2.TemplateError(message)

        # The settings of transformers' `apply_chat_template`: other blanks would be other tokens.
        environment = Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = reject
        environment.globals["range"] = limited_range
        environment.globals["strftime_now"] = strftime_now
        try:
            return environment.from_string(self.text)
        except jinja2.TemplateError as error:
            raise ArtifactError(
                f"the chat template in {self.file} is invalid: {_clause(error)}."
            ) from error


def _clause(error: Exception) -> str:
    """Return an error's message as the end of a sentence; Jinja's messages are sentences."""
    return ", ".join(sentence.rstrip(".") for sentence in str(error).split(". "))


@dataclass(frozen=True)
class PairTemplate:
    """The prompt of a reranker that is a language model: a query and a document as two messages.

    As in sentence-transformers from 5.4 on: the roles are `query` and `document`, and an
    instruction is a system message before them.
    """

    chat: ChatTemplate
    instruction: str
    """The instruction of the model's own files; empty for none."""
    variables: Mapping[str, Any]
    """Variables of the template from sentence_bert_config.json."""
    structured: bool
    """The template reads content as a list of parts, in place of a string."""

    @classmethod
    def open(cls, directory: Path) -> PairTemplate | None:
        """Read the template of a sentence-transformers reranker; None if it takes plain pairs.

        Raises:
            ArtifactError: a file cannot be read, or the template leaves a query or document out.
        """
        sentence = SentenceBertConfig.read(directory)
        if "message" not in sentence.modality_config:
            return None
        if "Pooling" in module_kinds(directory):
            raise ArtifactError(
                f"{directory / SentenceBertConfig.FILE}: the model embeds chat messages, which is "
                "not supported; supported are texts with a prompt in front.",
                do="Run the graph with OrtRunner, on inputs of sentence-transformers.",
            )
        chat = ChatTemplate.open(directory)
        if chat is None:
            return None
        prompts = SentenceTransformersConfig.read(directory)
        instruction = prompts.prompts.get(prompts.default_prompt_name) or ""
        variables = sentence.processing_kwargs.chat_template
        _ = chat.compiled  # else the loop would hide that the template is invalid
        # Templates read content as a string or, like those for images, as a list of parts.
        for structured in (False, True):
            template = cls(chat, instruction, variables, structured)
            try:
                prompt = template.render(*_PROBES)
            except ArtifactError:
                continue
            if all(probe in prompt for probe in _PROBES):
                return template
        raise ArtifactError(
            f"the chat template in {chat.file} leaves out the messages of the roles 'query' and "
            "'document', which a reranker needs.",
            do="Use a template that renders both roles.",
        )

    def render(self, query: str, document: str, *, instruction: str = "") -> str:
        """Return the prompt for one pair; an empty instruction means the model's own."""
        contents = {
            "system": instruction or self.instruction,
            "query": query,
            "document": document,
        }
        messages = [
            {
                "role": role,
                "content": [{"type": "text", "text": text}] if self.structured else text,
            }
            for role, text in contents.items()
            if text or role != "system"
        ]
        return self.chat.render(messages, **self.variables)

    @cached_property
    def suffix(self) -> str:
        """The text behind both texts in every prompt; a long document is cut in front of it."""
        prompt = self.render(*_PROBES)
        return prompt[max(prompt.rfind(probe) + len(probe) for probe in _PROBES) :]


_PROBES = ("q7Fz1query", "d9Kx2document")
"""A query and a document that no template contains."""
