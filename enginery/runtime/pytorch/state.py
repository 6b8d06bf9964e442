"""Put a PyTorch model back into the state in which it was loaded.

A forward may change a model: BigBird switches its attention for good when it sees a short text,
LongRoPE replaces its frequencies by those of long texts, dynamic rotary embeddings keep those of
the longest text. The outputs of such a model depend on its earlier inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from enginery.core.errors import ExportError

_Attributes = dict[str, Any]

_CONTAINERS = (dict, list, set)
_INSTALLED = "_output_capturing_hooks_installed"
"""Attribute by which transformers 5 remembers that a model's parts have hooks, which only record
hidden states. Without it, a second set of hooks would record each of them twice."""


@dataclass
class _Holder:
    """A module or a configuration, with its attributes."""

    name: str
    attributes: _Attributes
    """The live attributes."""
    saved: _Attributes
    """Those that were saved: the same objects."""
    contents: dict[str, Any] = field(default_factory=dict)
    """Shallow copies of dicts, lists and sets among them."""

    @classmethod
    def of(cls, name: str, item: Any) -> _Holder:
        attributes = vars(item)
        saved = dict(attributes)
        # Of torch's own dicts, those that hold parts, parameters and buffers are among them.
        contents = {k: v.copy() for k, v in saved.items() if type(v) in _CONTAINERS}
        return cls(name, attributes, saved, contents)

    def changes(self) -> list[str]:
        """Return the names of the attributes that have changed."""
        if self.attributes.keys() == self.saved.keys() and all(
            map(_is, self.attributes.values(), self.saved.values())
        ):
            names = []
        else:
            every = {**self.saved, **self.attributes}
            names = [
                name
                for name in every
                if name != _INSTALLED
                and not _is(self.attributes.get(name, self), self.saved.get(name, self))
            ]
        inside = [
            name for name, copied in self.contents.items() if _differs(self.saved[name], copied)
        ]
        return [*names, *inside]

    def restore(self) -> None:
        """Put back the attributes and what was in them."""
        for name in self.attributes.keys() - self.saved.keys() - {_INSTALLED}:
            del self.attributes[name]
        installed = self.attributes.get(_INSTALLED)
        self.attributes.update(self.saved)
        if installed is not None:
            self.attributes[_INSTALLED] = installed
        for name, copied in self.contents.items():
            live = self.saved[name]
            if not _differs(live, copied):
                continue
            live.clear()
            if isinstance(live, list):
                live.extend(copied)
            else:
                live.update(copied)


class ModelState:
    """The parts, attributes, buffers and configurations of a model as they were at first."""

    def __init__(self, model: Any) -> None:
        """Save the state of a model; of buffers a copy."""
        self.changed: dict[str, None] = {}
        """Attributes that a forward has changed so far, such as `bert.attention_type`."""
        self._holders = [_Holder.of(name, module) for name, module in model.named_modules()]
        configs = {
            id(config): config
            for module in model.modules()
            if hasattr(config := vars(module).get("config"), "__dict__")
        }
        self._holders += [_Holder.of("config", config) for config in configs.values()]
        # Version counters show what is written into a tensor in place.
        self._buffers = [
            (name, buffer, buffer.detach().clone(), buffer._version)  # noqa: SLF001
            for name, buffer in model.named_buffers()
        ]
        # Copies of all weights would take too much memory.
        self._weights = [
            (name, weight, weight._version)  # noqa: SLF001
            for name, weight in model.named_parameters()
        ]

    def anew(self, model: Any) -> ModelState:
        """Return the model's present state, with what has changed before."""
        state = ModelState(model)
        state.changed |= self.changed
        return state

    def restore(self) -> None:
        """Undo what has changed since the state was saved.

        Raises:
            ExportError: the model has written into its weights, of which there is no copy.
        """
        for holder in self._holders:
            if names := holder.changes():
                prefix = f"{holder.name}." if holder.name else ""
                self.changed |= dict.fromkeys(prefix + name for name in _plain(names, holder))
                holder.restore()
        for index, (name, buffer, values, version) in enumerate(self._buffers):
            if buffer._version != version:  # noqa: SLF001
                self.changed[name] = None
                with torch.no_grad():
                    buffer.copy_(values)
                self._buffers[index] = (name, buffer, values, buffer._version)  # noqa: SLF001
        for name, weight, version in self._weights:
            if weight._version != version:  # noqa: SLF001
                raise ExportError(
                    f"PyTorch's model changes its weight {name} while it runs, so its answers "
                    "depend on the inputs before."
                )

    def describe(self) -> str:
        """Describe what forwards have changed; empty if nothing."""
        if not self.changed:
            return ""
        names = list(self.changed)
        more = f", … ({len(names)} attributes)" if len(names) > 3 else ""
        return (
            f"PyTorch's model changes itself while it runs ({', '.join(names[:3])}{more}); it was "
            "put back before each input"
        )


def _plain(names: list[str], holder: _Holder) -> list[str]:
    """Return the names of attributes, with those of torch's own dicts in place of the dicts."""
    plain = []
    for name in names:
        copied = holder.contents.get(name)
        if name in ("_buffers", "_modules", "_parameters") and copied is not None:
            live = holder.saved[name]
            plain += [key for key in live if live[key] is not copied.get(key)]
        else:
            plain.append(name)
    return plain


def _is(value: Any, other: Any) -> bool:
    """Return True for one object, and for equal numbers and texts."""
    if value is other:
        return True
    return (
        type(value) is type(other) and isinstance(value, int | float | str) and bool(value == other)
    )


def _differs(live: Any, copied: Any) -> bool:
    """Return True if a container holds other objects than its copy."""
    if len(live) != len(copied):
        return True
    if isinstance(live, dict):
        return not (
            all(map(_is, live.keys(), copied.keys()))
            and all(map(_is, live.values(), copied.values()))
        )
    if isinstance(live, list):
        return not all(map(_is, live, copied))
    return bool(live != copied)
