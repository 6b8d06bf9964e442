"""Render chat templates: the child process of `chat_template`.

Jinja's sandbox keeps a template from reaching anything. The limits here bound what it can build:
the process cannot take more memory, and a prompt has a largest length. Its parent ends it if it
takes too long.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from enginery.core.errors import ArtifactError
from enginery.core.subprocess import WorkerResult, serve_requests

MAX_CHARACTERS = 2**24
"""Maximum length of a prompt."""
MAX_BYTES = 256 * 1024**2
"""Memory that a rendering may take."""
_MAX_REPEATED = 2**16
"""Largest result of a multiplication, and largest range, in a template."""


def handle_request(request: WorkerResult) -> WorkerResult:
    """Render conversations, or only check the template.

    Raises:
        ArtifactError: the template is invalid, or fails on a conversation.
    """
    where = f"the chat template in {request['file']}"
    render = _guarded(lambda: _compiled(request["text"]), f"{where} is invalid")
    prompts = []
    for messages in request.get("conversations", ()):
        prompt = _guarded(
            lambda: render(messages=messages, **request["variables"]),  # noqa: B023  called at once
            f"{where} fails on these messages",
        )
        if len(prompt) > MAX_CHARACTERS:
            raise ArtifactError(
                f"{where} fails on these messages: the prompt has {len(prompt)} characters, "
                f"expected at most {MAX_CHARACTERS}."
            )
        prompts.append(prompt)
    return {"prompts": prompts}


def _guarded(work: Callable[[], Any], what: str) -> Any:
    """Return what `work` does; raise ArtifactError for any exception, a template's own included."""
    try:
        return work()
    except MemoryError:
        reason = f"it needs more than {MAX_BYTES // 1024**2} MiB of memory"
    except Exception as error:
        # Jinja's messages are sentences.
        text = ", ".join(sentence.rstrip(".") for sentence in str(error)[:500].split(". "))
        kind = type(error)
        is_own = kind.__module__.partition(".")[0] == "jinja2" and text
        reason = text if is_own else f"{kind.__name__}: {text}" if text else kind.__name__
    raise ArtifactError(f"{what}: {reason}.")


@lru_cache(maxsize=4)
def _compiled(text: str) -> Callable[..., str]:
    """Return the function that renders a template."""
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
            # What is set in the block is not set after it, as in transformers.
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
    render: Callable[..., str] = environment.from_string(text).render
    return render


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let this process take `MAX_BYTES` more than it has, within the block; not on Windows."""
    if sys.platform == "win32":
        yield
        return
    import resource

    import jinja2.sandbox  # noqa: F401  counts as what it has

    statm = Path("/proc/self/statm")
    size = 4 * MAX_BYTES  # where the system does not say
    if statm.is_file():
        size = int(statm.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = size + MAX_BYTES
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    with suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    with limited_memory():
        serve_requests(handle_request)
