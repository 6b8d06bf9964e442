"""Render a model's chat template: the prompt that it was trained on, from messages.

    template = ChatTemplate.open(directory)
    template.render([{"role": "user", "content": "Is it warm?"}], add_generation_prompt=True)

A template is a Jinja document in `chat_template.jinja` or `tokenizer_config.json`. It comes with
the model, so it runs in Jinja's sandbox, as in transformers, and in a child process with limits on
memory and time: many ways lead to a text of gigabytes, and to loops without end.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from enginery.core.errors import ArtifactError
from enginery.core.json_file import read_document
from enginery.core.model.files import (
    SentenceBertConfig,
    SentenceTransformersConfig,
    TokenizerConfig,
    module_kinds,
)
from enginery.core.subprocess import WorkerProcess, WorkerResult
from enginery.core.trust.confinement import is_confined
from enginery.core.trust.resource_limits import ResourceLimits
from enginery.runtime.text.template_worker import handle_request, limited_memory
from enginery.runtime.text.tokenizer_files import TokenizerFiles

FILE = "chat_template.jinja"

Message = Mapping[str, Any]
"""`role` and `content`, as OpenAI's API has them."""

_MAX_BYTES = 2**20
"""Size of the largest template that is read; published ones have up to 20 kB."""
_LIMITS = ResourceLimits(seconds=10.0)
"""Limits of a rendering; published templates take a millisecond. The child limits its memory."""
_WAIT_SECONDS = 20.0
"""Maximum time to wait for the renderings of others."""
_ALWAYS = {"tools": None, "documents": None}
"""Variables that transformers defines for every conversation."""
_CONVERSATIONS_TOGETHER = 64
"""Number of conversations that the child renders at a time."""


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
            ArtifactError: the template is invalid, rejects the messages, or needs too much time or
                memory.
        """
        (prompt,) = self.render_all([messages], **variables)
        return prompt

    def render_all(self, conversations: Sequence[Sequence[Message]], **variables: Any) -> list[str]:
        """Return the prompt for each conversation; see `render`."""
        prompts: list[str] = []
        for start in range(0, len(conversations), _CONVERSATIONS_TOGETHER):
            result = self._request(
                "render",
                conversations=conversations[start : start + _CONVERSATIONS_TOGETHER],
                variables={**_ALWAYS, **self.special_tokens, **variables},
            )
            prompts += result["prompts"]
        return prompts

    def check(self) -> None:
        """Raise ArtifactError if the template is invalid."""
        self._request("check")

    def _request(self, command: str, **values: Any) -> WorkerResult:
        values |= {"text": self.text, "file": str(self.file)}
        if is_confined():  # by a process that traces a model, and is thrown away itself
            with limited_memory():
                return handle_request(values)
        return _renderer(self.text).request(command, **values)


class _Renderer:
    """The child process that renders one template, which is started again if it ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._owner = 0

    def request(self, command: str, **values: Any) -> WorkerResult:
        """Send a request; see `ChatTemplate`."""
        where = f"the chat template in {values['file']}"
        if not self._lock.acquire(timeout=_WAIT_SECONDS):
            raise ArtifactError(f"{where} is busy: others wait for it.")
        try:
            process = self._process
            if process is None or not process.is_alive or self._owner != os.getpid():
                process = self._start(where)
            return process.request(command, limits=_LIMITS, **values)
        finally:
            self._lock.release()

    def _start(self, where: str) -> WorkerProcess:
        if self._process is not None:
            _end(self._process, self._owner)
        try:
            process = WorkerProcess(
                "enginery.runtime.text.template_worker",
                log=Path(os.devnull),
                description=where,
                error=ArtifactError,
            )
        except OSError as error:
            raise ArtifactError(
                f"{where} cannot be rendered: its process does not start: {error.strerror}."
            ) from error
        self._process, self._owner = process, os.getpid()
        weakref.finalize(self, _end, process, self._owner)
        process.request("check", text="", file="")  # without a limit: it imports Jinja
        return process


def _end(process: WorkerProcess, owner: int) -> None:
    if os.getpid() == owner:  # a process that was forked from it shares the descriptors only
        process.close()


@lru_cache(maxsize=16)
def _renderer(text: str) -> _Renderer:  # noqa: ARG001  each template has its own
    return _Renderer()


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
        chat.check()  # else the loop would hide that the template is invalid
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
        (prompt,) = self.render_all([(query, document)], instruction=instruction)
        return prompt

    def render_all(self, pairs: Sequence[tuple[str, str]], *, instruction: str = "") -> list[str]:
        """Return the prompt for each pair of a query and a document; see `render`."""
        conversations = [
            [
                {
                    "role": role,
                    "content": [{"type": "text", "text": text}] if self.structured else text,
                }
                for role, text in (
                    ("system", instruction or self.instruction),
                    ("query", query),
                    ("document", document),
                )
                if text or role != "system"
            ]
            for query, document in pairs
        ]
        return self.chat.render_all(conversations, **self.variables)

    @cached_property
    def suffix(self) -> str:
        """The text behind both texts in every prompt; a long document is cut in front of it."""
        prompt = self.render(*_PROBES)
        return prompt[max(prompt.rfind(probe) + len(probe) for probe in _PROBES) :]


_PROBES = ("q7Fz1query", "d9Kx2document")
"""A query and a document that no template contains."""
