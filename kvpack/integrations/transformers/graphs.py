"""Runs a model's decode steps over a KvpackCache as CUDA graphs, which a replaced ``forward`` captures and replays."""

from __future__ import annotations

import contextlib
import gc
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, Self

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.utils import ModelOutput

from kvpack.cache_names import NAMES, cache_in
from kvpack.formats.errors import KvpackWarning
from kvpack.runtime.modes import float32_no_grad

from . import masks
from .hooks import outermost_model
from .model_changes import Lease, ModelChange, lease
from .model_snapshot import ModelSnapshot, count_global_hooks, has_other_hooks
from .model_state import active_adapters
from .states import CapturedStep, PackedLength

EAGER_STEPS, DEFAULT_EAGER_STEPS = 1, 4
"""Number of consecutive steps of one kind that run normally before a capture, so that kernels are compiled and prepared.

A capture costs as much time as several replays save. The second number applies unless the user requests graphs, so that short series have
none.
"""

_TENSORS = {"input_ids", "attention_mask", "position_ids"}
_OUTPUT_SETTINGS = {"output_attentions", "output_hidden_states"}
_SETTINGS = {"logits_to_keep", "return_dict", "use_cache", *_OUTPUT_SETTINGS}
"""Arguments that a captured step may have: tensors, which are copied into the graph, and settings, which are constants of the graph.

Arguments that request more outputs must not be set.
"""

_CAPTURE_LOCK = threading.Lock()
"""Lock that serializes captures, because all of them use one stream."""

_NOT_CAPTURED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Models for which a capture that the user did not request has failed. No capture is tried again for their next caches."""


class StepGraphs:
    """CUDA graphs of a model's decode steps over the KvpackCache ``cache``. ``layer_index`` is the index of a layer with tokens.

    A step is a forward pass over one new token per sequence, with only token ids, positions and a left-padding mask. The first steps of a
    series run without a graph, and then one is captured. To detect steps that depend on values on the host, the cache reports a wrong
    length during the capture, and the first replay must match the step without a graph bit for bit. Otherwise no graph is used, and a
    KvpackWarning reports why. Any other pass ends the series and discards its graph.

    Graphs that the user has not ``requested`` are used only for models whose code is entirely from PyTorch and transformers, and never
    cause a warning.
    """

    def __init__(self, cache: Any, layer_index: int, requested: bool) -> None:
        self._cache, self._number, self._requested = weakref.ref(cache), layer_index, requested
        self._kind: Hashable = None
        self._eager, self._launches = 0, -1
        self._graph: _Graph | None = None
        self.refused: str | None = None
        """Reason why graphs are not used, or None as long as they are possible."""
        self.captured: CapturedStep | None = None
        """The step that is being captured, or None if there is none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(memo[id(self._cache())], self._number, self._requested)

    def __call__(self, forward: Callable[..., Any], model: torch.nn.Module, snapshot: _CachedSnapshot, arguments: dict[str, Any]) -> Any:
        """Return ``forward(**arguments)``, where ``forward`` is the method of ``model``, which has not changed since ``snapshot``."""
        cache = self._cache()
        assert cache is not None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            # The caller is capturing a graph, so keep ours but capture nothing.
            self._kind = None
            return forward(**arguments)
        step = None if self.refused else self._step(cache, model, arguments)
        same = step is not None and step.kind == self._kind and cache.live.launches == self._launches
        graph = self._graph
        if not same or (graph and (cache.live.seen_tokens(self._number) < graph.min_length or not graph.model_is_unchanged)):
            self.drop()
        if step is None:
            return forward(**arguments)
        if self._graph is not None and cache.live.room < 1:
            cache.live.roll()
            if cache.live.launches != self._launches:
                self.drop()
        self._kind = step.kind
        if self._graph is not None:
            return self._graph.replay(cache, step, self._number)
        self._eager += 1
        out = forward(**arguments)
        if self._eager > (EAGER_STEPS if self._requested else DEFAULT_EAGER_STEPS) and cache.live.launches == self._launches:
            self._capture(cache, forward, model, snapshot, arguments, step, out)
        self._launches = cache.live.launches
        return out

    def drop(self) -> None:
        self._graph, self._eager, self._kind = None, 0, None

    def _step(self, cache: Any, model: torch.nn.Module, arguments: Mapping[str, Any]) -> _Step | None:
        """Return the decode step for a pass with these arguments, or None if it is not a decode step."""
        step_arguments = {name: value for name, value in arguments.items() if value is not None and name not in NAMES}
        ids, positions = step_arguments.get("input_ids"), step_arguments.get("position_ids")
        if not step_arguments.keys() <= _TENSORS | _SETTINGS or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] != 1:
            return None
        settings = {name: step_arguments[name] for name in step_arguments.keys() & _SETTINGS}
        if not all(isinstance(value, (bool, int)) for value in settings.values()) or any(settings.get(name) for name in _OUTPUT_SETTINGS):
            return None
        device = ids.device
        if not can_capture(device) or not cache.records(model) or cache.live.is_uneven or model.training or torch.is_grad_enabled():
            return None
        if torch.is_autocast_enabled(device.type) or _is_intercepted():
            return None
        if positions is not None and not (isinstance(positions, torch.Tensor) and positions.dim() == 2 and positions.device == device):
            return None
        starts, mask = None, step_arguments.get("attention_mask")
        if mask is not None:
            if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[0] != ids.shape[0]:
                return None
            padding = masks.read_padding(PackedLength(cache.live.seen_tokens(self._number) + 1), 0, mask.to(device))
            if not padding.on_the_left:
                return None
            starts = padding.starts
        shape = None if positions is None else positions.shape
        modes = torch.is_inference_mode_enabled(), active_adapters(model), tuple(sorted(settings.items())), cache.passes.changes
        return _Step((ids.shape, ids.dtype, device, shape, starts is None, modes), ids, positions, starts)

    def _capture(
        self,
        cache: Any,
        forward: Callable[..., Any],
        model: torch.nn.Module,
        snapshot: _CachedSnapshot,
        arguments: Mapping[str, Any],
        step: _Step,
        expected: Any,
    ) -> None:
        """Capture the step that has just returned ``expected``.

        If the capture fails, or if a replay returns anything else, graphs are disabled.
        """
        if not self._requested:
            self.refused = "a step of the model could not be captured" if model in _NOT_CAPTURED else snapshot.current(model).foreign_part
            if self.refused:
                return
        live, tokens, generator = cache.live, cache.live.seen_tokens(self._number), _get_generator(step.ids.device)
        restore_tail, random = live.save_tail(), generator.get_state()
        try:
            _check_model(model, step.ids.device)
            if not isinstance(expected, ModelOutput):
                raise _GraphRefused("the model does not return a ModelOutput")
            # Run the same step again: its token is still in the tail.
            live.adjust_length(-1)
            graph = _Graph(self, cache, partial(forward, **arguments), step, self._number, partial(snapshot.current, model))
            if not _same_values(graph.replay(cache, step, self._number), expected):
                raise _GraphRefused("a captured step gives different results, so it depends on more than token ids and positions")
        except BaseException as error:
            live.adjust_length(tokens - live.seen_tokens(self._number))
            restore_tail()
            if not isinstance(error, Exception):
                raise
            # Any error means that the step cannot be captured, because it has just run without a capture.
            self.refused = str(error) or type(error).__name__
        else:
            self._graph = graph
            return
        finally:
            # Leave the random numbers as they were after the step without a graph.
            generator.set_state(random)
        if self._requested:
            warnings.warn(f"decode steps of {type(model).__name__} run without CUDA graphs: {self.refused}", KvpackWarning, stacklevel=5)
        else:
            _NOT_CAPTURED.add(model)


class _GraphRefused(Exception):
    """Raised if a step cannot be captured. The message is the reason."""


class _Step(NamedTuple):
    """A decode step: its kind and its tensors. Steps of the same kind differ only in the tensors' values."""

    kind: Hashable
    ids: torch.Tensor
    positions: torch.Tensor | None
    starts: torch.Tensor | None


class _Graph:
    """A captured step over ``cache``. It may be replayed if the cache has at least ``min_length`` tokens."""

    def __init__(
        self,
        owner: StepGraphs,
        cache: Any,
        call: Callable[..., Any],
        step: _Step,
        layer_index: int,
        snapshot: Callable[[], ModelSnapshot],
    ) -> None:
        device = step.ids.device
        positions = torch.full_like(step.ids, 0) if step.positions is None else step.positions
        with float32_no_grad(device):
            self._ids, self._positions = step.ids.clone(), positions.clone()
            self._starts = None if step.starts is None else step.starts.clone()
        step_arguments = {"input_ids": self._ids, "position_ids": self._positions, "attention_mask": None}
        # Half the current length never occurs in a replay, and is valid everywhere.
        self.min_length = max(1, cache.live.seen_tokens(layer_index) // 2)
        owner.captured = CapturedStep(self._starts, self.min_length)
        try:
            with cache.live.capturing(), cache.passes.without_recording():
                self._replay, output = capture(lambda: call(**step_arguments), device)
        finally:
            owner.captured = None
        # Omit the cache: with a reference cycle, it and this graph would stay until garbage collection.
        self._make, self._values = type(output), {name: None if x is cache else x for name, x in output.items()}
        # A weak reference, because the snapshot refers to the weights, and the graph may outlive the model.
        self._snapshot = weakref.ref(snapshot())

    @property
    def model_is_unchanged(self) -> bool:
        """True if nothing in the model has changed since the capture, except for weights that changed in place."""
        snapshot = self._snapshot()
        return snapshot is not None and snapshot.unchanged()

    def replay(self, cache: Any, step: _Step, layer_index: int) -> Any:
        """Replay the graph with the inputs of ``step``, and return the result."""
        before = cache.live.seen_tokens(layer_index)
        self._ids.copy_(step.ids)
        if step.positions is None:
            self._positions.fill_(before)
        else:
            self._positions.copy_(step.positions)
        if self._starts is not None and step.starts is not None:
            self._starts.copy_(step.starts)
        try:
            self._replay()
            cache.live.record_replay(1)
        except BaseException:
            # After an interrupt, make the device's count match the host's.
            cache.live.adjust_length(0)
            raise
        cache.passes.record_appended(before + 1)
        copied = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in self._values.items()}
        return self._make(**{name: cache if x is None else x for name, x in copied.items()})


class _CachedSnapshot:
    """A model's snapshot, which is computed once and reused until the model changes."""

    def __init__(self) -> None:
        self._kept: ModelSnapshot | None = None

    def current(self, model: torch.nn.Module) -> ModelSnapshot:
        if self._kept is None or not self._kept.unchanged():
            self._kept = ModelSnapshot(model)
        return self._kept


class ForwardSwitch(ModelChange):
    """A replacement of one model's ``forward`` for passes over caches with graphs, until the original is restored."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._before = vars(model).get("forward")
        model.forward = _SwitchedForward(model, self._before)

    @staticmethod
    def for_model(model: torch.nn.Module) -> Lease[ForwardSwitch]:
        """Return a lease on the ``ForwardSwitch`` of ``model``, unwrapping it first if needed."""
        return lease(ForwardSwitch, outermost_model(model))

    def undo(self) -> None:
        """Restore the original. If someone has wrapped the forward in the meantime, leave it: without graphs, it only calls the original.
        """
        model = self.module()
        if model is None or not isinstance(vars(model).get("forward"), _SwitchedForward):
            return
        if self._before is None:
            del vars(model)["forward"]
        else:
            vars(model)["forward"] = self._before


class _SwitchedForward:
    """A ``forward`` method of ``model``. It replaces ``previous_forward`` or, if that is None, the method of the model's class.

    A copied model gets its own.
    """

    def __init__(self, model: torch.nn.Module, previous_forward: Any) -> None:
        self._model, self._before, self._snapshot = weakref.ref(model), previous_forward, _CachedSnapshot()
        # generate inspects the signature.
        self.__signature__ = inspect.signature(model.forward)
        self._names = [name for name, parameter in self.__signature__.parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]

    @property
    def replaces_class_method(self) -> bool:
        """True if this object replaces the ``forward`` of the model's class, not one that was set on the instance."""
        return self._before is None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._model()))
        return self if copied is None or self._before is not None else _SwitchedForward(copied, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None
        forward = partial(type(model).forward, model) if self._before is None else self._before
        graphs = None if torch.compiler.is_dynamo_compiling() else getattr(cache_in(kwargs), "graphs", None)
        if graphs is None or len(args) > len(self._names):
            return forward(*args, **kwargs)
        return graphs(forward, model, self._snapshot, {**dict(zip(self._names, args, strict=False)), **kwargs})


def may_replay(model: torch.nn.Module) -> bool:
    """Return True if decode steps of ``model`` may be replayed although the user has not requested graphs.

    The model's code is inspected later, before the first capture.
    """
    forward, parameter = vars(outermost_model(model)).get("forward"), next(model.parameters(), None)
    return parameter is not None and can_capture(parameter.device) and (forward is None or getattr(forward, "replaces_class_method", False))


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def capture(call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Capture ``call``. Returns a function that replays it, and the result. Each replay overwrites the tensors in the result.

    Raises PyTorch's errors.
    """
    graph, stream, before = torch.cuda.CUDAGraph(), _get_capture_stream(device), torch.cuda.current_stream(device)
    pool: Any = torch.cuda.graph_pool_handle()
    with _CAPTURE_LOCK, _without_collection(), torch.cuda.device(device), torch.cuda.stream(stream):
        stream.wait_stream(before)
        # Other threads may use the device during the capture.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = call()
        finally:
            try:
                graph.capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    _leave_capture_mode(device, pool)
                raise
        before.wait_stream(stream)
    return graph.replay, result


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Return a context manager that disables garbage collection, because collecting a CUDA graph would abort a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _leave_capture_mode(device: torch.device, pool: Any) -> None:
    """Make PyTorch's allocator and random number generator leave capture mode after a failed capture.

    Before PyTorch 2.12, both stay in capture mode. Calling ``empty_cache`` (PyTorch #180395) or drawing random numbers would then raise.
    """
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        # This raises if the capture has already ended.
        with contextlib.suppress(RuntimeError):
            end(device.index, pool)
    # The generator leaves capture mode at the end of another capture.
    number, graph = torch.zeros(1, dtype=torch.float32, device=device), torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    number.zero_()
    graph.capture_end()


@cache
def _get_capture_stream(device: torch.device) -> Any:
    """Return the device's capture stream. All captures share it, because libraries allocate a workspace per stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _get_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def _is_intercepted() -> bool:
    """Return True if a PyTorch mode intercepts operations, which replays would bypass.

    Modes that only set the default device do not count.
    """
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    function_modes = (mode for mode in modes if not isinstance(mode, DeviceContext))
    return any(function_modes) or bool(_get_current_dispatch_mode_stack())


def _check_model(model: torch.nn.Module, device: torch.device) -> None:
    """Raise _GraphRefused if a call of ``model`` has effects that a replay would not have."""
    if any(parameter.device != device for parameter in model.parameters()):
        raise _GraphRefused(f"its weights are not all on {device}")
    hooked = next((name for name, module in model.named_modules() if has_other_hooks(module)), None)
    if count_global_hooks():
        hooked = "every module"
    if hooked is not None:
        raise _GraphRefused(f"{hooked or 'the model'} has forward hooks, which a replay would skip")


def _same_values(first: Any, second: Any) -> bool:
    """Return True if two outputs of a model are equal, bit for bit."""
    if type(first) is not type(second) or first.keys() != second.keys():
        return False
    for name, x in first.items():
        y = second[name]
        if isinstance(x, torch.Tensor):
            if not isinstance(y, torch.Tensor) or not torch.equal(x, y):
                return False
        elif x is not y:
            return False
    return True


def step_graphs(
    cache: Any, layer_index: int, requested: bool | None, model: torch.nn.Module | None, name: str, obstacle: str
) -> StepGraphs | None:
    """Return an object that replays decode steps of ``cache``, or None if graphs are not used.

    ``layer_index`` is the index of the first layer with tokens. ``requested`` is the user's choice. If it is True, a KvpackWarning reports
    what prevents graphs.
    """
    requested_or_default = requested if requested is not None else model is not None and may_replay(model)
    if requested_or_default and not obstacle:
        return StepGraphs(cache, layer_index, bool(requested))
    if requested:
        warnings.warn(f"decode steps of {name} run without CUDA graphs: {obstacle}", KvpackWarning, stacklevel=4)
    return None
