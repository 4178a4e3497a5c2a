"""Data of ignorable features: layer positions, layer states, hidden tokens and position offsets (spec/container.md)."""

from __future__ import annotations

import re

from .contents import File, Tensor
from .conventions import DTYPE_BYTES, word64
from .features import HIDDEN_TOKENS, LAYER_POSITIONS, LAYER_STATE, POSITION_OFFSETS
from .limits import LIMITS, MAX_BATCH, MAX_TOKENS
from .refusal import require

POSITIONS = "container.md, Layer positions"
STATES = "container.md, Layer states"
RECORD = 96
HIDDEN = "container.md, Hidden tokens"
HIDDEN_RECORD = 20
OFFSETS = "container.md, Position offsets"


def take_starts(file: File, is_required: bool) -> list[int]:
    """Return the start of every layer (container.md, Layer positions)."""
    require(
        is_required == (LAYER_POSITIONS in file.ignorable),
        POSITIONS,
        f"{LAYER_POSITIONS} must be in both required and ignorable, or in neither",
    )
    if not is_required:
        return [file.start] * len(file.layers)
    data = file.ignorable[LAYER_POSITIONS]
    require(
        len(data) == 8 * len(file.layers), POSITIONS, f"the data has {len(data)} bytes, expected 8 for each of {len(file.layers)} layers"
    )
    starts = [word64(data, at) for at in range(0, len(data), 8)]
    for number, (start, layer) in enumerate(zip(starts, file.layers, strict=True)):
        require(start >= file.start, POSITIONS, f"layer {number} starts at {start}, but must not start before the file, at {file.start}")
        require(start <= MAX_TOKENS, LIMITS, f"layer {number} starts at {start}, expected at most {MAX_TOKENS}")
        require(
            start == file.start or any(layer.values()),
            POSITIONS,
            f"layer {number} has neither keys nor values, so it must start with the file, but starts at {start}",
        )
    require(
        starts != [file.start] * len(starts),
        POSITIONS,
        f"every layer starts at {file.start}, the file's start, so the feature must be omitted",
    )
    return starts


def take_offsets(file: File, states: list[tuple[int, Tensor]], is_required: bool) -> list[int] | None:
    """Return the offset of every sequence (container.md, Position offsets)."""
    require(
        is_required == (POSITION_OFFSETS in file.ignorable),
        OFFSETS,
        f"{POSITION_OFFSETS} must be in both required and ignorable, or in neither",
    )
    if not is_required:
        return None
    data = file.ignorable[POSITION_OFFSETS]
    require(len(data) > 0 and len(data) % 8 == 0, OFFSETS, f"the data has {len(data)} bytes, expected a positive multiple of 8")
    offsets = [int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, len(data), 8)]
    sides = [(start, side) for start, layer in zip(file.starts, file.layers, strict=True) for side in layer.values() if side]
    batches = {side.batch for _, side in sides} | {tensor.shape[0] for _, tensor in states}
    require(batches <= {len(offsets)}, OFFSETS, f"the data has offsets for {len(offsets)} sequences, but the layers have {sorted(batches)}")
    stop = max((start + side.shape[2] for start, side in sides), default=file.start)
    for offset in offsets:
        require(stop + offset >= 0, OFFSETS, f"the position after token {stop} is {stop + offset}")
        require(stop + offset <= MAX_TOKENS, LIMITS, f"the position after token {stop} is {stop + offset}")
    return offsets


def take_states(file: File, is_required: bool) -> list[tuple[int, Tensor]]:
    """Return the layer and the tensor of every state (container.md, Layer states)."""
    require(is_required == (LAYER_STATE in file.ignorable), STATES, f"{LAYER_STATE} must be in both required and ignorable, or in neither")
    if not is_required:
        return []
    data = file.ignorable[LAYER_STATE]
    require(len(data) > 0 and len(data) % RECORD == 0, STATES, f"the data has {len(data)} bytes, expected a positive multiple of {RECORD}")
    states: list[tuple[int, Tensor]] = []
    last = (-1, b"")
    for at in range(0, len(data), RECORD):
        layer, dtype, count = int.from_bytes(data[at : at + 2], "little"), data[at + 2], data[at + 3]
        sizes = [word64(data, at + 4 + 8 * place) for place in range(8)]
        name = data[at + 68 : at + RECORD].rstrip(b"\0")
        require(
            dtype < len(DTYPE_BYTES) and count <= 8,
            STATES,
            f"a state has dtype {dtype} and {count} sizes, expected a dtype below {len(DTYPE_BYTES)} and at most 8 sizes",
        )
        require(
            all(sizes[: max(1, count)]) and not any(sizes[count:]),
            STATES,
            f"a state has the sizes {sizes}, expected {count} positive sizes followed by zeros",
        )
        require(re.fullmatch(rb"[a-z][a-z0-9_.]*", name) is not None, STATES, f"a state has the invalid name {name!r}")
        require(sizes[0] <= MAX_BATCH and max(sizes) <= MAX_TOKENS, LIMITS, f"a state has the sizes {sizes}, which exceed a limit")
        require(layer < len(file.layers), STATES, f"a state belongs to layer {layer}, but the file has {len(file.layers)} layers")
        require(
            (layer, name) > last, STATES, f"the state {name!r} of layer {layer} follows {last}, but states must ascend by layer and name"
        )
        before = [tensor.shape[0] for number, tensor in states if number == layer]
        batches = {sizes[0], *before, *(side.batch for side in file.layers[layer].values() if side)}
        require(len(batches) == 1, STATES, f"the states, keys and values of layer {layer} have different numbers of sequences")
        last = layer, name
        states.append((layer, Tensor(f"{layer}.state.{name.decode()}", list(DTYPE_BYTES)[dtype], tuple(sizes[:count]))))
    return states


def take_hidden(file: File, is_required: bool, sequences: list[int]) -> list[tuple[int, int, int]]:
    """Return every range of hidden tokens (container.md, Hidden tokens). ``sequences`` are the numbers of sequences in the states."""
    require(
        is_required == (HIDDEN_TOKENS in file.ignorable), HIDDEN, f"{HIDDEN_TOKENS} must be in both required and ignorable, or in neither"
    )
    if not is_required:
        return []
    data = file.ignorable[HIDDEN_TOKENS]
    require(
        len(data) > 0 and len(data) % HIDDEN_RECORD == 0,
        HIDDEN,
        f"the data has {len(data)} bytes, expected a positive multiple of {HIDDEN_RECORD}",
    )
    sides = [(start, side) for start, layer in zip(file.starts, file.layers, strict=True) for side in layer.values() if side]
    batch = min([*sequences, *(side.batch for _, side in sides)], default=0)
    end = max((start + side.shape[2] for start, side in sides), default=file.start)
    stretches: list[tuple[int, int, int]] = []
    for at in range(0, len(data), HIDDEN_RECORD):
        row, first, stop = int.from_bytes(data[at : at + 4], "little"), word64(data, at + 4), word64(data, at + 12)
        require(row < batch, HIDDEN, f"a range is in sequence {row}, but the file has {batch} sequences")
        require(
            file.start <= first < stop <= end,
            HIDDEN,
            f"the range [{first}:{stop}] is empty or not within the file's tokens [{file.start}:{end}]",
        )
        last = stretches[-1] if stretches else (-1, 0, 0)
        require(
            row > last[0] or (row == last[0] and first > last[2]),
            HIDDEN,
            f"the range {(row, first, stop)} follows {last}, but ranges must ascend and have tokens between them",
        )
        stretches.append((row, first, stop))
    return stretches
