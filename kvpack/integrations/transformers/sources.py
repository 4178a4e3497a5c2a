"""Digests of the inputs of an encoder-decoder model's encoder (its sources), and their comparison with the sources of caches."""

from __future__ import annotations

import hashlib
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvpack.file.sources import DIGEST, Source, Sources, first_difference
from kvpack.formats.errors import InvalidParameter, KvpackWarning

from .passes import WITHOUT_EFFECT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .record import Record

    class Tracker(Protocol):
        """Interface of objects that track forward passes over one of the two caches of an encoder-decoder model.

        ``is_continuing`` is True if the cache has tokens.
        """

        has_warned_of_source: bool

        @property
        def is_continuing(self) -> bool: ...

        @property
        def record(self) -> Record: ...


_MAX_SOURCES = 4096
"""Maximum number of sequences whose source is remembered."""
_MAX_DIGESTS = 8
"""Maximum number of tensors whose digests are remembered."""

_EMPTY = "EncoderDecoderCache(KvpackCache(model, recipe), KvpackCache(model, recipe))"


class EncoderCalls:
    """A record of one model's encoder calls. It maps digests of their outputs to digests of their inputs.

    ``generate`` passes only the encoder's output to a decoder, and repeats its sequences for beams.
    """

    def __init__(self) -> None:
        self._input_digests: dict[str, str] = {}
        self._read: dict[int, tuple[weakref.ref[torch.Tensor], int, tuple[str, ...]]] = {}

    # Digests are computed on the host.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def record_call(self, arguments: Mapping[str, Any], output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        hidden = output[0] if hidden is None and isinstance(output, tuple) and output else hidden
        outputs = self._output_digests(hidden)
        for result, given in zip(outputs, _input_digests(arguments, len(outputs)), strict=True):
            self._input_digests.pop(result, None)
            self._input_digests[result] = given
        while len(self._input_digests) > _MAX_SOURCES:
            self._input_digests.pop(next(iter(self._input_digests)), None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def sources(self, hidden: Any) -> Sources | None:
        """Return the sources of the encoder output ``hidden``, ``[batch, token, dim]``, or None if its values are not in memory."""
        sources = tuple(Source(self._input_digests.get(output, ""), output) for output in self._output_digests(hidden))
        return (sources[:1] if len(set(sources)) == 1 else sources) or None

    def _output_digests(self, hidden: Any) -> tuple[str, ...]:
        """Return the digest of each sequence's encoder output. Digests are cached, because each decode step passes the same tensor."""
        if not isinstance(hidden, torch.Tensor) or hidden.dim() < 2 or hidden.is_meta:
            return ()
        version = 0 if hidden.is_inference() else hidden._version
        seen, read, digests = self._read.get(id(hidden), (None, 0, ()))
        if seen is None or seen() is not hidden or read != version:
            digests = tuple(_digest([("output", row)]) for row in hidden.detach().cpu())
            self._read.pop(id(hidden), None)
            self._read[id(hidden)] = weakref.ref(hidden), version, digests
            while len(self._read) > _MAX_DIGESTS:
                self._read.pop(next(iter(self._read)), None)
        return digests


def encoder_decoder_parts(inner_models: Sequence[Any], name: str) -> list[torch.nn.Module]:
    """Return the encoders or the decoders of the encoder-decoder models in ``inner_models``. ``name`` is "get_encoder" or "get_decoder"."""
    owners = (model for model in inner_models if getattr(model.config, "is_encoder_decoder", False) and hasattr(model, name))
    parts = {id(part): part for model in owners if (part := getattr(model, name)()) is not model}
    return [part for part in parts.values() if isinstance(part, torch.nn.Module)]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def check_sources(trackers: Sequence[Tracker], actual: Sources) -> None:
    """Check that a pass read the inputs ``actual`` of both caches of an encoder-decoder model. ``trackers`` track the caches.

    Raises InvalidParameter if they differ, or if the caches have different sources. Issues a KvpackWarning once if a cache does not record
    its sources.
    """
    filled = [tracker for tracker in trackers if tracker.is_continuing]
    for tracker in filled:
        if len(tracker.record.sources) > 1:
            raise InvalidParameter(
                "the tokens of the cache were computed from different sources, so no single source can continue them: compute all of them "
                f"from one source, into {_EMPTY}"
            )
    recorded = [sources for tracker in filled for sources in tracker.record.sources]
    for sources in recorded[1:]:
        if (row := first_difference(recorded[0], sources)) is not None:
            raise InvalidParameter(
                f"the caches of self-attention and cross-attention come from different sources: row {row} of one depends on an encoder's "
                f"{_source_name(recorded[0], row)}, but that row of the other depends on {_source_name(sources, row)}: pair caches "
                "that were saved together"
            )
    if recorded and (row := first_difference(recorded[0], actual)) is not None:
        raise InvalidParameter(
            f"the encoder got a different source than the one that the caches were computed from: row {row} now has an encoder's "
            f"{_source_name(actual, row)}, but the caches depend on {_source_name(recorded[0], row)}: pass that source, or compute "
            f"the other one into {_EMPTY}. Only if it is the same source, encoded elsewhere, use "
            "KvpackCache.of(dataclasses.replace(cache, inputs=None), model) for both caches, which skips comparing sources, ids and masks"
        )
    unknown = [tracker for tracker in filled if not tracker.record.sources]
    if unknown and not any(tracker.has_warned_of_source for tracker in trackers):
        warnings.warn(
            "a cache does not record the encoder's input, so a wrong source would not be noticed: pass the source "
            "that it was computed from",
            KvpackWarning,
            stacklevel=2,
        )
    for tracker in unknown:
        tracker.has_warned_of_source = True


def _source_name(sources: Sources, row: int) -> str:
    source = sources[min(row, len(sources) - 1)]
    return f"input {source.input} and output {source.output}" if source.input else f"output {source.output}"


def _input_digests(arguments: Mapping[str, Any], batch: int) -> tuple[str, ...]:
    """Return the digest of each sequence's encoder input.

    The digests are empty if an argument that may affect the output cannot be digested.
    """
    inputs = {name: value for name, value in arguments.items() if name not in WITHOUT_EFFECT and value is not False}
    if not inputs or not all(isinstance(value, torch.Tensor) and not value.is_meta for value in inputs.values()):
        return ("",) * batch
    tensors = [(name, value.detach().cpu()) for name, value in sorted(inputs.items()) if not _hides_nothing(name, value)]
    by_row = [[(name, value[row] if value.dim() and len(value) == batch else value) for name, value in tensors] for row in range(batch)]
    return tuple(map(_digest, by_row))


def _hides_nothing(name: str, value: torch.Tensor) -> bool:
    """Return True for an all-ones attention mask, which ``generate`` creates if the caller passes none."""
    return name == "attention_mask" and value.dim() == 2 and bool((value == 1).all())


def _digest(tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Return the digest of named tensors. Integers have the same digest in every dtype."""
    total = hashlib.sha256()
    for name, values in tensors:
        plain = values if values.is_floating_point() or values.is_complex() else values.to(torch.int64)
        total.update(f"{name} {plain.dtype} {list(plain.shape)};".encode())
        total.update(plain.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()[:DIGEST]
