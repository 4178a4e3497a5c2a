"""inspect and verify: what a file holds, and whether every byte of it is right."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from kvpack.file.container import open_file
from kvpack.file.header import FORMAT
from kvpack.file.inputs import Inputs
from kvpack.file.metadata import FEATURE, from_bytes
from kvpack.formats.arguments import check_callback
from kvpack.formats.transform import Transform

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from kvpack.file.container import File
    from kvpack.file.header import SideEntry
    from kvpack.formats.base import Codec

    from .bases import Basis


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of the file at ``path``, read from its checked header: what ``kvpack inspect --json`` prints.

    The keys are those of ``summarize``; a basis also has its ``sha256``. No value is read; ``verify`` checks them.
    Raises MissingFile, NotKvpack, Truncated, UnsupportedVersion, UnknownCodec, InvalidHeader, DigestMismatch or LimitExceeded.

    >>> kvpack.inspect("prompt.kvpack")["recipe"]  # doctest: +SKIP
    'octopus-3'
    """
    with open_file(path) as file:
        summary = summarize(file)
    if summary["is_basis"]:
        # Needs numpy.
        from .bases import opened

        with opened(path) as basis:
            summary["sha256"] = basis.digest().hex()
    return summary


def summarize(file: File) -> dict[str, Any]:
    """Everything that the header says, as JSON values (bytes stay bytes)."""
    header = file.header
    inputs = Inputs.from_features(header.ignorable, header.hidden, header.batch)
    stored: Counter[tuple[int, str]] = Counter()
    streams: Counter[str] = Counter()
    for tensor in header.tensors:
        number, name, stream = tensor.name.split(".", 2)
        stored[int(number), name] += tensor.stored_bytes
        streams[f"{name}.{stream}"] += tensor.stored_bytes
    layers = [
        {name: _side(header.codecs[side.codec], side, header.starts[number], stored[number, name]) for name, side in layer.sides()}
        for number, layer in enumerate(header.layers)
    ]
    sides = [side for layer in layers for side in layer.values()]
    states = [
        {"name": state.where, "dtype": state.dtype, "shape": list(state.shape), "stored_bytes": file.tensors[state.where].stored_bytes}
        for state in header.states
    ]
    packed = sum(side["values"] for side in sides)
    values = packed + sum(math.prod(state.shape) for state in header.states)
    payload = sum(streams.values())
    return {
        "file": file.where,
        "format": FORMAT,
        "bytes": file.size,
        "values": values,
        "bits_per_value": 8 * file.size / values if values else 0.0,
        "nominal_bits": sum(side["nominal_bits"] * side["values"] for side in sides) / packed if packed else 0.0,
        "recipe": header.recipe,
        "model": dict(header.model),
        "start": header.start,
        "stop": max((side["stop"] for side in sides), default=header.start),
        "token_ids": 0 if inputs is None else inputs.tokens,
        "undetermined": [] if inputs is None else list(inputs.undetermined),
        "metadata": from_bytes(header.ignorable.get(FEATURE, b"")),
        "is_basis": header.is_basis,
        "bases": sorted(frozenset().union(*(codec.bases_needed for codec in header.codecs))),
        "codecs": [codec.params() for codec in header.codecs],
        "layers": layers,
        "states": states,
        "streams": {**streams, "header and padding": file.size - payload},
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": t.shape, "filter": t.filter, "stored_bytes": t.stored_bytes, "xxh3_128": t.digest}
            for t in header.tensors
        ],
    }


def _side(codec: Codec, side: SideEntry, start: int, stored: int) -> dict[str, Any]:
    values = side.batch * side.heads * side.tokens * codec.dim
    return {
        "codec": side.codec,
        "batch": side.batch,
        "heads": side.heads,
        "start": start,
        "stop": start + side.tokens,
        "tokens": side.tokens,
        "packed_tokens": side.packed,
        "tail_tokens": side.tail,
        "tail_dtype": side.tail_dtype,
        "window": side.window,
        "dim": codec.dim,
        "values": values,
        "stored_bytes": stored,
        "bits_per_value": 8 * stored / values if values else 0.0,
        "nominal_bits": codec.nominal_bits,
    }


def verify(
    path: str | os.PathLike[str],
    *,
    basis: Basis | str | os.PathLike[str] | Sequence[Basis | str | os.PathLike[str]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Check every digest, digit, scale and spare bit of the file at ``path``; ``progress(done, total)`` counts tensors.

    ``basis``, as for ``kvpack.load``, is needed only to check the digits of the codec transform. Returns the ``file``, its ``bytes``,
    the number of its ``layers``, and ``needs_basis``: True if something was left unchecked for want of a basis.
    Raises what ``inspect`` raises, InvalidPayload, and MissingBasis for a ``basis`` that is not the file's.

    >>> kvpack.verify("prompt.kvpack")["needs_basis"]  # doctest: +SKIP
    False
    """
    check_callback(progress)
    with open_file(path) as file:
        if basis is not None:
            # Needs torch.
            from .basis_sources import located

            file.header = located(file.where, file.header, basis)
        file.verify(progress)
        unchecked = any(isinstance(codec.family, Transform) and codec.family.source is None for codec in file.header.codecs)
        return {"file": file.where, "bytes": file.size, "layers": len(file.header.layers), "needs_basis": unchecked}
