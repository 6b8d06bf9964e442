"""Record the random numbers that a PyTorch model draws, and give them to another run.

    with RandomNumbers() as drawn:
        model(**inputs)
    with RandomNumbers(drawn.arrays):    # in FP64, the same numbers
        model.double()(**inputs)

A graph in ONNX draws from other generators. With PyTorch's numbers as its inputs it can be compared
(VITS adds noise, ViT-MAE hides patches, SpeechT5 drops values in inference, too).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from enginery.core.errors import EngineryError, os_errors_as
from enginery.core.model.random_numbers import random_input

_SEED = 0
_NORMAL = {torch.randn, torch.randn_like}
_UNIFORM = {torch.rand, torch.rand_like}
_BERNOULLI = {torch.bernoulli, torch.Tensor.bernoulli}


class RandomNumbers(TorchFunctionMode):  # type: ignore[misc]  # torch is not type-checked
    """Record or replay the standard normal and uniform numbers that PyTorch draws.

    Bernoulli's are drawn as `uniform < p`, as torch.onnx exports them.
    """

    def __init__(self, given: Mapping[str, NDArray[Any]] | None = None) -> None:
        """Record numbers, or replay those of an earlier run, by name as in `arrays`."""
        super().__init__()
        self.arrays: dict[str, NDArray[Any]] = dict(given or {})
        """By the names of the inputs that take their place in a graph, in order."""
        self._replays = given is not None
        self._count = 0
        if not self._replays:
            torch.manual_seed(_SEED)

    @classmethod
    @contextmanager
    def of(cls, file: Path) -> Iterator[None]:
        """Replay the numbers of a file in the block; without the file, record and write them.

        Raises:
            EngineryError: the file cannot be written.
        """
        if file.exists():
            with np.load(file, allow_pickle=False) as stored:
                numbers = {name: stored[name] for name in stored.files}
            with cls(numbers):
                yield
            return
        recording = cls()
        with recording:
            yield
        with os_errors_as(EngineryError, "random numbers cannot be written"):
            np.savez(file, allow_pickle=False, **recording.arrays)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function, and record or replace what it draws.

        Raises:
            ValueError: the model draws other numbers than in the earlier run.
        """
        found = func(*args, **(kwargs or {}))
        if func in _NORMAL:
            return self._draw("normal", found)
        if func in _UNIFORM:
            return self._draw("uniform", found)
        if func in _BERNOULLI:
            probability = (kwargs or {}).get("p", args[1] if len(args) > 1 else args[0])
            drawn = self._draw("uniform", torch.rand(found.shape, device=found.device))
            return (drawn < probability).to(found.dtype)
        return found

    def _draw(self, distribution: str, found: Any) -> Any:
        name = random_input(self._count, distribution)
        self._count += 1
        if not self._replays:
            self.arrays[name] = found.detach().cpu().float().numpy()
            return found
        given = self.arrays.get(name)
        if given is None or given.shape != tuple(found.shape):
            raise ValueError("it draws other random numbers than in the run before")
        return torch.from_numpy(np.array(given)).to(found)
