"""Run a session on inputs and outputs that stay on its device, in reused buffers (IOBinding).

    binding = DeviceBinding(session, record.inputs, record.outputs, device=Device("cuda", 0))
    logits = binding.run({"input_ids": ids_on_the_gpu, ...})["logits"]
    torch.from_dlpack(logits).device    # device(type='cuda', index=0)

Without binding, ONNX Runtime copies every input to the GPU and every output back, even if it is
there already. Each combination of input shapes gets a bucket of buffers: outputs are allocated
once, and inputs from the host are copied into existing buffers. The most recently used buckets are
kept.

With `capture`, the run of a bucket is recorded as a CUDA graph and replayed. Then every input is
copied, because a replay uses the addresses of the recording.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.closing import Closeable
from enginery.core.errors import InputError, OptionError, ProviderError, ShapeError
from enginery.core.shapes import TensorSpec, canonical_dim
from enginery.runtime.engines.padding import dim_sizes
from enginery.runtime.onnxruntime.capture_lock import CAPTURE_LOCK
from enginery.runtime.onnxruntime.cuda_graphs import (
    CaptureCandidate,
    CaptureOptions,
    CapturePolicy,
    CaptureStatistics,
    Key,
)
from enginery.runtime.onnxruntime.device_values import (
    ELEMENTS,
    Device,
    device_of,
    is_on,
    new_buffer,
    read_value,
    shape_of,
    shape_only_array,
)

BUCKETS = 8
"""Default number of combinations of input shapes that keep their buffers."""

_NO_CAPTURE = "-1"
_GRAPH_ID = "gpu_graph_id"
_MAX_UNRECORDED_BYTES = 1 << 30
"""Maximum size of the buffers of shapes that are not recorded, except for the last one."""
UNRECORDED = {_GRAPH_ID: _NO_CAPTURE}
"""Run option for a run without a CUDA graph, in a session that records them."""


@dataclass
class _Bucket:
    """The buffers of one combination of input shapes."""

    bound: Any
    inputs: dict[str, Any] = field(default_factory=dict)
    """Buffers into which inputs are copied."""
    outputs: dict[str, Any] = field(default_factory=dict)
    """Buffers of outputs whose shapes are known before the run."""
    free: list[str] = field(default_factory=list)
    """Names of outputs that ONNX Runtime allocates in each run."""
    held: dict[str, Any] = field(default_factory=dict)
    """Inputs that are bound without a copy; they must outlive the run."""
    zeros: set[str] = field(default_factory=set)
    """Inputs whose buffers have held only zeros, such as token types; zeros are not copied."""
    graph: str = _NO_CAPTURE
    options: Any = None
    """`onnxruntime.RunOptions` of the bucket; None for the defaults."""
    bytes: int = 0
    """Size of the inputs, and of the outputs of known shape."""


@dataclass(frozen=True)
class BindingOptions(CaptureOptions):
    """How a `DeviceBinding` keeps buffers and records CUDA graphs."""

    buckets: int = BUCKETS
    """Number of combinations of input shapes that keep their buffers."""
    run_config: Mapping[str, str] = field(default_factory=dict)
    """Entries of ONNX Runtime's run options, such as `memory.enable_memory_arena_shrinkage`."""


# ONNX Runtime's CUDA provider keeps its CUDA graphs in a context of each thread, so the first run
# of a bucket in another thread records it again.
class _Recorded(threading.local):
    """The CUDA graphs that the current thread has recorded."""

    def __init__(self) -> None:
        self.graphs: set[str] = set()


class DeviceBinding(Closeable):
    """A session with bound inputs and outputs. Threads are serialized: one run at a time."""

    def __init__(
        self,
        session: Any,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        options: BindingOptions = BindingOptions(),
        *,
        device: Device | None = None,
        statistics: CaptureStatistics | None = None,
    ) -> None:
        """Prepare the binding; buffers are allocated by the first run.

        Args:
            session: an `onnxruntime.InferenceSession`.
            inputs: inputs of the graph, with their named dims.
            outputs: outputs of the graph that are fetched; their dims are computed from those of
                the inputs.
            options: buffers and CUDA graphs.
            device: device of the tensors; None for that of the session's first provider.
            statistics: those of the session, if it has several bindings; None for a new one.

        Raises:
            OptionError: `buckets` is below 1.
            ProviderError: the dtype of an input or an output cannot be bound.
        """
        if options.buckets < 1:
            raise OptionError(f"buckets is {options.buckets}, expected 1 or more.")
        for spec in (*inputs, *outputs):
            if spec.dtype not in ELEMENTS:
                raise ProviderError(
                    f"{spec}: a tensor of {spec.dtype} cannot be bound.",
                    do="Run it with io_binding=False.",
                )
        self.device = device or device_of(session)
        self.capture = options.capture
        self._options = options
        self._session: Any = session
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        # numpy lacks bfloat16, so such an input never comes as an array of ours.
        self._dtypes = [
            (spec.name, np.dtype(spec.dtype)) for spec in inputs if spec.dtype != "bfloat16"
        ]
        self._limit = options.buckets
        self._buckets: OrderedDict[Key, _Bucket] = OrderedDict()
        self._captured: dict[Key, _Bucket] = {}
        self.statistics = statistics or CaptureStatistics()
        """Counts of the session's CUDA graphs, if runs are captured."""
        self._policy = CapturePolicy(options, self.statistics, max_graphs=options.buckets)
        self._recorded = _Recorded()
        self._lock = self.statistics.lock
        self._unrecorded: Any = None
        if options.capture:
            self._unrecorded = run_options({**options.run_config, **UNRECORDED})
        self._shapes_vary = False

    def __call__(self, feeds: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Run the graph on the feeds of `run` and return copies of the outputs on the host.

        Raises:
            InputError, ShapeError, ProviderError: see `run`; or an output is bfloat16, which numpy
                does not have.
        """
        # The copies to the host belong to the run: the next one on the same shapes overwrites the
        # buffers.
        with self._lock:
            values = self._run(feeds)
            # A copy from the GPU would break a recording in another thread, even of another
            # session.
            with CAPTURE_LOCK.running():
                return {name: self._copied(value) for name, value in values.items()}

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run the graph and leave the outputs on the device.

        Args:
            feeds: for each input a numpy array, an `onnxruntime.OrtValue` or another object with
                DLPack, such as a torch tensor on the host or on the session's GPU (not copied
                there). The caller must wait for kernels that still write it; torch is synchronized
                here.

        Returns:
            An `onnxruntime.OrtValue` for each output; use it with `torch.from_dlpack(value)`. The
            next run on the same shapes overwrites them.

        Raises:
            InputError: an input is missing, unknown, on another device or of another type, or the
                graph fails.
            ShapeError: inputs have different sizes of the same dim.
            ProviderError: the binding is closed.
        """
        with self._lock:
            return self._run(feeds)

    def close(self) -> None:
        """Free the buffers and release the session, after the run in progress."""
        with self._lock:
            self._buckets.clear()
            self._captured.clear()
            self._session = None

    @property
    def shapes(self) -> tuple[Key, ...]:
        """Input shapes of all buckets, the least recently used first."""
        return (*self._captured, *self._buckets)

    @property
    def captured(self) -> tuple[Key, ...]:
        """Input shapes, in the order of the inputs, whose runs are recorded."""
        return tuple(self._captured)

    def has_buffers(self, feeds: Mapping[str, NDArray[Any]]) -> bool:
        """Return True if inputs of these shapes have run before and their buffers are kept."""
        key = tuple(feeds[spec.name].shape for spec in self._inputs)
        return key in self._captured or key in self._buckets

    def replay(self, feeds: Mapping[str, Any]) -> dict[str, NDArray[Any]] | None:
        """Replay the CUDA graph of arrays of these shapes, and return copies of the outputs.

        This does the work of a run and nothing else: at small shapes the checks of `run` would take
        as long as the GPU.

        Returns:
            The outputs; None if the current thread has not recorded these shapes, or the feeds are
            not exactly the graph's inputs as arrays.

        Raises:
            InputError: the graph fails.
        """
        captured = self._captured
        # `_dtypes` lacks inputs of bfloat16, so graphs with such inputs always take the long way.
        if not captured or len(feeds) != len(self._dtypes):
            return None
        shapes = []
        for name, dtype in self._dtypes:
            array = feeds.get(name)
            if type(array) is not np.ndarray or array.dtype != dtype:
                return None
            shapes.append(array.shape)
        key = tuple(shapes)
        bucket = captured.get(key)
        # ONNX Runtime would record the graph in this thread, which has to happen under the other
        # lock.
        if bucket is None or bucket.graph not in self._recorded.graphs:
            return None
        with self._lock, CAPTURE_LOCK.running():
            # `close` may have come between the look-up above and the lock.
            if self._session is None:
                raise ProviderError("the binding is closed.")
            bound = bucket.bound
            for name, buffer in bucket.inputs.items():
                array = feeds[name]
                # Token types of single texts are all 0, and so is the buffer until anything else is
                # written. Once it was, zeros are copied like other values.
                if name in bucket.zeros:
                    if not array.any():
                        continue
                    bucket.zeros.remove(name)
                buffer.update_inplace(np.asarray(array, order="C"))
                bound.bind_ortvalue_input(name, buffer)  # see `_bind_input`
            # Copies to the device may still be under way; the graph must not read before they end.
            bound.synchronize_inputs()
            try:
                self._session.run_with_iobinding(bound, bucket.options)
            except Exception as error:  # ONNX Runtime raises many unrelated types
                raise self._failure(key, error) from error
            bound.synchronize_outputs()
            return {name: self._copied(value) for name, value in bucket.outputs.items()}

    def _copied(self, value: Any) -> NDArray[Any]:
        """Return a copy of a value on the host."""
        # On the host `numpy()` returns the buffer itself, which the next run overwrites; from a GPU
        # it returns a copy.
        array: NDArray[Any] = value.numpy()
        return array.copy() if self.device.kind == "cpu" else array

    def _run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        if self._session is None:
            raise ProviderError("the binding is closed.")
        with CAPTURE_LOCK.running():
            values = self._read_feeds(feeds)
            key = tuple(shape_of(values[spec.name]) for spec in self._inputs)
            bucket = self._bucket(key, values)
            for spec in self._inputs:
                self._bind_input(bucket, spec, values[spec.name])
            self._bind_free(bucket)
            bucket.bound.synchronize_inputs()
        try:
            self._run_bound(bucket)
        except Exception as error:  # ONNX Runtime raises many unrelated types
            if self._options.lenient and bucket.graph != _NO_CAPTURE:
                # Other CUDA work in the process breaks a recording, and so do nodes that wait.
                self._failure(key, error)
                # The second call runs it without a CUDA graph.
                self._policy.refuse(key)
                return self._run(feeds)
            if self._try_without_buffers(bucket):
                return self._outputs_of(bucket)
            raise self._failure(key, error) from error
        return self._outputs_of(bucket)

    def _failure(self, key: Key, error: Exception) -> InputError:
        """Discard the bucket of a failed run, whose outputs may be incomplete."""
        self._buckets.pop(key, None)
        if (failed := self._captured.pop(key, None)) is not None:
            self.statistics.buffer_bytes -= failed.bytes
        shapes = ", ".join(
            f"{spec.name} {shape}" for spec, shape in zip(self._inputs, key, strict=True)
        )
        return InputError(f"the graph fails on {shapes}: {error}")

    def _run_bound(self, bucket: _Bucket) -> None:
        """Run the session, alone in this process if the run records a CUDA graph."""
        recorded, statistics = self._recorded.graphs, self.statistics
        records = bucket.graph != _NO_CAPTURE and bucket.graph not in recorded
        options = bucket.options
        if records and not self._policy.thread_may_record():
            records, options = False, self._unrecorded
        started = time.perf_counter()
        # The recording must see no other CUDA work of this process. Outputs are waited for inside
        # the lock, because that is CUDA work as well.
        with CAPTURE_LOCK.capturing() if records else CAPTURE_LOCK.running():
            self._session.run_with_iobinding(bucket.bound, options)
            bucket.bound.synchronize_outputs()
        if records:
            recorded.add(bucket.graph)
            statistics.recorded += 1
            statistics.seconds += time.perf_counter() - started
        # Counts runs that `lenient` has just refused to record, too.
        statistics.unrecorded_runs += bucket.graph not in recorded

    def _outputs_of(self, bucket: _Bucket) -> dict[str, Any]:
        # Outputs come in the order of binding, which is that of the graph.
        names = (spec.name for spec in self._outputs)
        return dict(zip(names, bucket.bound.get_outputs(), strict=True))

    def _read_feeds(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checked inputs: numpy arrays on the host, OrtValues on devices."""
        names = [spec.name for spec in self._inputs]
        if unknown := [name for name in feeds if name not in names]:
            raise InputError(f"unknown input '{unknown[0]}'; the graph takes {', '.join(names)}.")
        if missing := [name for name in names if name not in feeds]:
            raise InputError(
                f"input '{missing[0]}' is missing; found {', '.join(feeds) or 'none'}."
            )
        return {spec.name: read_value(spec, feeds[spec.name], self.device) for spec in self._inputs}

    def _bucket(self, key: tuple[tuple[int, ...], ...], values: Mapping[str, Any]) -> _Bucket:
        if key in self._captured:
            return self._captured[key]
        shapes = {name: shape_only_array(value) for name, value in values.items()}
        sizes = dim_sizes(self._inputs, shapes)
        captures = self.capture and self._policy.records_run(self._candidate(key, sizes))
        if key in self._buckets:
            if not captures:
                self._buckets.move_to_end(key)
                return self._buckets[key]
            # The buffers of plain runs are not those of a recording, so the bucket is made anew.
            del self._buckets[key]
        bucket = _Bucket(self._session.io_binding(), bytes=self._bytes(key, sizes))
        self._bind_outputs(bucket, sizes, required=captures)
        if captures:
            # ONNX Runtime replays a CUDA graph by this number and does not look at shapes or
            # addresses, so each bucket has its own. 0 would be the number of runs that name none.
            self.statistics.graphs += 1
            bucket.graph = str(self.statistics.graphs)
            bucket.zeros = {
                name
                for name, value in values.items()
                if isinstance(value, np.ndarray) and not value.any()
            }
            self.statistics.buffer_bytes += bucket.bytes
            bucket.options = self._run_options(bucket)
            # A replay uses the addresses of the recording, so this bucket is never discarded.
            self._captured[key] = bucket
            self._policy.forget_runs(key)
            return bucket
        bucket.options = self._run_options(bucket)
        self._buckets[key] = bucket
        # The limit is that of recorded buckets, which a ladder may set to hundreds; buffers of
        # other shapes need not be kept that long.
        limit = min(self._limit, BUCKETS) if self.capture else self._limit
        # The least recently used buckets go first; the present one stays even if it alone is too
        # large.
        while len(self._buckets) > 1 and (
            len(self._buckets) > limit
            or sum(recent.bytes for recent in self._buckets.values()) > _MAX_UNRECORDED_BYTES
        ):
            self._buckets.popitem(last=False)
        return bucket

    def _bind_input(self, bucket: _Bucket, spec: TensorSpec, value: Any) -> None:
        import onnxruntime as ort

        if is_on(value, self.device) and bucket.graph == _NO_CAPTURE:
            # Bind the caller's memory without a copy. A recording would go on reading the address
            # of this one array, so only plain runs do this.
            on_host = isinstance(value, np.ndarray)
            held = ort.OrtValue.ortvalue_from_numpy(value) if on_host else value
            # The caller's memory has to outlive the run: keep the value that refers to it.
            bucket.held[spec.name] = held
            bucket.bound.bind_ortvalue_input(spec.name, held)
            return
        if spec.name not in bucket.inputs:
            bucket.inputs[spec.name] = new_buffer(spec.dtype, shape_of(value), self.device)
        buffer = bucket.inputs[spec.name]
        if not isinstance(value, np.ndarray) or value.any():
            bucket.zeros.discard(spec.name)
        buffer.update_inplace(value)
        # Bind after every update: if the first node that reads the input is on the CPU, ONNX
        # Runtime copies the buffer when it is bound, and does not see what is written later.
        bucket.bound.bind_ortvalue_input(spec.name, buffer)
        bucket.held.pop(spec.name, None)

    def can_capture(self, feeds: Mapping[str, NDArray[Any]]) -> bool:
        """Return True if runs on inputs of these shapes are or will be recorded."""
        key = tuple(feeds[spec.name].shape for spec in self._inputs)
        if key in self._captured:
            return True
        candidate = self._candidate(key, dim_sizes(self._inputs, feeds))
        return self.capture and self._policy.has_room(candidate)

    def _candidate(self, key: Key, sizes: Mapping[str, int]) -> CaptureCandidate:
        shapes = [_known_shape(spec, sizes) for spec in self._outputs]
        return CaptureCandidate(
            key,
            graphs=len(self._captured),
            buffer_bytes=self._bytes(key, sizes),
            has_fixed_outputs=not self._shapes_vary and None not in shapes,
        )

    def _bytes(self, key: Key, sizes: Mapping[str, int]) -> int:
        """Return the size of a bucket's inputs, and of its outputs of known shape."""
        shapes = [*zip(self._inputs, key, strict=True)]
        output_shapes = ((spec, _known_shape(spec, sizes)) for spec in self._outputs)
        shapes += [(spec, shape) for spec, shape in output_shapes if shape is not None]
        return sum(math.prod(shape) * _item_bytes(spec.dtype) for spec, shape in shapes)

    def _bind_outputs(
        self, bucket: _Bucket, sizes: Mapping[str, int], *, required: bool = False
    ) -> None:
        """Allocate outputs of known shape; ONNX Runtime allocates the others in each run.

        Raises:
            ProviderError: a shape is unknown, but `required` for a capture.
        """
        for spec in self._outputs:
            shape = None if self._shapes_vary else _known_shape(spec, sizes)
            if shape is None:
                if required:
                    raise ProviderError(
                        f"{spec}: its shape is unknown before a run, so runs cannot be captured.",
                        do="Run it with cuda_graph=False.",
                    )
                bucket.free.append(spec.name)
                # Bind now as well, because outputs come in the order of their first binding.
                self._bind_free(bucket)
            else:
                bucket.outputs[spec.name] = new_buffer(spec.dtype, shape, self.device)
                bucket.bound.bind_ortvalue_output(spec.name, bucket.outputs[spec.name])

    def _bind_free(self, bucket: _Bucket) -> None:
        """Bind before each run; otherwise ONNX Runtime would reuse the last run's shape."""
        for name in bucket.free:
            bucket.bound.bind_output(name, self.device.kind, self.device.index)

    def _try_without_buffers(self, bucket: _Bucket) -> bool:
        """Run without output buffers, in case the graph declares wrong dims; True if it runs."""
        # A recording needs its buffers, and without buffers the first failure had another cause.
        if bucket.graph != _NO_CAPTURE or not bucket.outputs:
            return False
        bucket.outputs.clear()
        bucket.bound.clear_binding_outputs()
        bucket.free = [spec.name for spec in self._outputs]
        self._bind_free(bucket)
        try:
            self._run_bound(bucket)
        except Exception:  # the caller reports the first failure
            return False
        # The dims in the graph were wrong for one shape, so they are not believed for others,
        # either.
        self._shapes_vary = True
        return True

    def _run_options(self, bucket: _Bucket) -> Any:
        config = dict(self._options.run_config)
        if self.capture:
            config[_GRAPH_ID] = bucket.graph
        return run_options(config)


def _item_bytes(dtype: str) -> int:
    """Return the size of a number in bytes; numpy does not have bfloat16."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def run_options(config: Mapping[str, str]) -> Any:
    """Return `onnxruntime.RunOptions` with these entries; None without entries."""
    if not config:
        return None
    import onnxruntime as ort

    options = ort.RunOptions()
    for name, value in config.items():
        options.add_run_config_entry(name, value)
    return options


def _known_shape(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return the shape of an output, computed from the inputs' sizes; None if that is unknown."""
    # -1 stands for a dim that the exporter did not declare.
    dims = tuple(dim if isinstance(dim, int) else canonical_dim(dim) for dim in spec.dims)
    if any(isinstance(dim, int) and dim < 0 for dim in dims):
        return None
    try:
        return TensorSpec(spec.name, spec.dtype, dims).shape(sizes)
    except ShapeError:
        return None
