"""Keep the CUDA work of other threads out of the capture of a CUDA graph.

    with CAPTURE_LOCK.running():      # together with other runs
        session.run(names, feeds)
    with CAPTURE_LOCK.capturing():    # alone in this process
        session.run_with_iobinding(binding, options)

ONNX Runtime captures with `cudaStreamCaptureModeGlobal` (core/providers/cuda/cuda_graph.cc): until
the capture ends, CUDA rejects allocations and synchronizations of all threads with error 900, and
the capture fails as well (github.com/microsoft/onnxruntime/issues/18806). The lock covers this
package's sessions. Other CUDA work of the process, such as torch's, is the caller's to hold back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CaptureLock:
    """A lock that many runs share, and one capture holds alone. It is not reentrant."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs = 0
        self._waiting = 0
        self._captures = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wait for captures, those that wait included, and hold back new ones."""
        with self._changed:
            while self._captures or self._waiting:
                self._changed.wait()
            self._runs += 1
        try:
            yield
        finally:
            with self._changed:
                self._runs -= 1
                self._changed.notify_all()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Wait for runs and captures, and hold back new ones."""
        with self._changed:
            self._waiting += 1
            try:
                while self._captures or self._runs:
                    self._changed.wait()
                self._captures = True
            finally:  # Ctrl-C ends the wait
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._captures = False
                self._changed.notify_all()


CAPTURE_LOCK = CaptureLock()
"""The lock of this process."""
