"""The thorough search: losses of single tensors (the keys or values of a layer), a greedy allocation, and measured exchanges."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from kvpack.formats.errors import InvalidParameter, ValueTooLarge

from .allocation import Allocation, TensorKey, recipe_text, uniform_allocation
from .greedy import Losses, allocate, convex_hull
from .tensor_losses import single_tensor_recipe

if TYPE_CHECKING:
    from .candidates import PackedCandidates
    from .measurement import Loss, Windows

MAX_UNIFORM_RECIPES = 6
"""Maximum number of uniform recipes that are measured: those with the smallest predicted losses."""

MAX_ROUNDS = 2

RECIPES_PER_ROUND = 4
"""Typical number of recipes that a round measures after its single changes, for estimating progress."""


@dataclass(frozen=True)
class Measurement:
    """An allocation with its measured loss. ``role`` describes its role in the search."""

    role: str
    allocation: Allocation
    loss: Loss


@dataclass
class Search:
    """The inputs of a search, and its measurements in the order in which they were made."""

    candidates: PackedCandidates
    windows: Windows
    budget: int
    """Maximum size of one file in bytes."""
    measurements: list[Measurement] = field(default_factory=list)
    sensitivities: Losses = field(default_factory=dict)

    def measure(self, role: str, allocation: Allocation) -> Measurement:
        """Measure the loss of a whole allocation, and add it to ``measurements``."""
        result = Measurement(role, allocation, self.windows.loss(recipe_text(allocation)))
        self.measurements.append(result)
        return result

    def fits(self, allocation: Allocation) -> bool:
        return self.candidates.file_bytes(allocation) <= self.budget

    def common_candidates(self, side: str) -> list[str]:
        """Return the candidates for ``side`` that all layers can use, smallest first."""
        first, *others = [codecs for (_, its_side), codecs in self.candidates.packed.items() if its_side == side]
        common = [codec for codec in first if all(codec in codecs for codecs in others)]
        return sorted(common, key=lambda codec: self.candidates.stream_bytes((0, side), codec))


def best_measurement(measured: list[Measurement]) -> Measurement:
    """Return the measurement with the smallest KL divergence, or the first one in a tie."""
    return min(measured, key=lambda measurement: measurement.loss.kl_divergence)


def thorough_search(search: Search) -> tuple[Measurement, Measurement | None]:
    """Return the tuned allocation and the best uniform one. The second is None if no uniform recipe fits the budget.

    The loss of each tensor is measured while all others are uncompressed, because such losses add up best. They only predict the loss of an
    allocation; the measured loss of the whole allocation decides. Raises InvalidParameter if no allocation fits the budget.
    """
    _check_budget(search)
    search.sensitivities = measure_sensitivities(search)
    result = measure_within_budget(search, "greedy", search.sensitivities)
    uniforms = [search.measure("uniform", allocation) for allocation in _promising_uniforms(search)]
    tuned = best_measurement([result, *uniforms])
    for _ in range(MAX_ROUNDS):
        changed = _exchange(search, tuned)
        if changed is None:
            break
        tuned = changed
    return tuned, best_measurement(uniforms) if uniforms else None


def recipe_count(layers: int, candidates: dict[str, list[str]]) -> int:
    """Return the approximate number of recipes that the thorough search measures."""
    return layers * sum(map(len, candidates.values())) + 1 + MAX_UNIFORM_RECIPES + MAX_ROUNDS * (4 * layers + RECIPES_PER_ROUND)


def measure_sensitivities(search: Search) -> Losses:
    """Return the loss of each tensor with each candidate while all other tensors are uncompressed.

    Candidates that cannot represent a window's values are omitted.
    """
    result: Losses = {}
    for (layer, side), codecs in search.candidates.packed.items():
        result[layer, side] = {}
        for codec in codecs:
            try:
                loss = search.windows.loss(single_tensor_recipe(layer, side, codec))
            except ValueTooLarge as error:
                search.candidates.left_out[layer, side][codec] = str(error)
                continue
            result[layer, side][codec] = loss.kl_divergence
        if not result[layer, side]:
            reason = next(iter(search.candidates.left_out[layer, side].values()))
            raise InvalidParameter(f"no candidate can encode layers[{layer}].{side}: {reason}")
    return result


def _check_budget(search: Search) -> None:
    """Raise InvalidParameter if no allocation fits the budget, before anything is measured."""
    losses = {tensor_key: dict.fromkeys(codecs, 0.0) for tensor_key, codecs in search.candidates.packed.items()}
    allocate(search.candidates, losses, search.budget)


def measure_within_budget(search: Search, role: str, losses: Losses) -> Measurement:
    """Measure the allocation with the smallest predicted loss among those whose files fit the budget in all windows."""
    budget = search.budget
    while True:
        result = search.measure(role, allocate(search.candidates, losses, budget))
        excess = result.loss.bytes - search.budget * len(search.windows.exact)
        if excess <= 0:
            return result
        search.measurements.pop()
        budget -= -(-excess // len(search.windows.exact))


def _promising_uniforms(search: Search) -> list[Allocation]:
    """Return the uniform allocations within the budget that have the smallest predicted losses, smallest first."""
    tensor_keys, known = search.candidates.tensor_keys, search.sensitivities
    result = []
    for k, v in product(search.common_candidates("k"), search.common_candidates("v")):
        allocation = uniform_allocation(tensor_keys, k, v)
        if search.fits(allocation) and all(codec in known[tensor_key] for tensor_key, codec in allocation.items()):
            result.append((sum(known[tensor_key][codec] for tensor_key, codec in allocation.items()), k, v))
    return [uniform_allocation(tensor_keys, k, v) for _, k, v in sorted(result)[:MAX_UNIFORM_RECIPES]]


def _exchange(search: Search, tuned: Measurement) -> Measurement | None:
    """Move bytes between tensors, starting from ``tuned``. Returns the new allocation, or None if its measured loss is not lower.

    The effect of each tensor is measured with all others as in ``tuned``. Because effects of simultaneous changes may not add up, fewer
    changes are tried if many do not reduce the loss, starting with the largest gains.
    """
    losses: Losses = {}
    for tensor_key, codec in tuned.allocation.items():
        losses[tensor_key] = {codec: tuned.loss.kl_divergence}
        for other in _neighbors(search, tensor_key, codec):
            losses[tensor_key][other] = search.windows.loss(recipe_text(tuned.allocation | {tensor_key: other})).kl_divergence
    free = set(losses)
    while True:
        kept = {
            tensor_key: tensor_losses if tensor_key in free else {tuned.allocation[tensor_key]: 0.0}
            for tensor_key, tensor_losses in losses.items()
        }
        result = measure_within_budget(search, "exchange", kept)
        if result.loss.kl_divergence < tuned.loss.kl_divergence:
            return result
        codecs = {tensor_key: (tuned.allocation[tensor_key], result.allocation[tensor_key]) for tensor_key in free}
        grown_tensors = [tensor_key for tensor_key in free if _needs_more_bytes(search, tensor_key, *codecs[tensor_key])]
        grown_tensors.sort(key=lambda tensor_key: (losses[tensor_key][result.allocation[tensor_key]], tensor_key))
        if len(grown_tensors) < 2:
            return None
        free = {tensor_key for tensor_key in free if tensor_key not in grown_tensors} | set(grown_tensors[: len(grown_tensors) // 2])


def _needs_more_bytes(search: Search, tensor_key: TensorKey, old_codec: str, new_codec: str) -> bool:
    return search.candidates.stream_bytes(tensor_key, new_codec) > search.candidates.stream_bytes(tensor_key, old_codec)


def _neighbors(search: Search, tensor_key: TensorKey, codec: str) -> list[str]:
    """Return the next smaller and the next larger codec for the tensor ``tensor_key`` on the convex hull of its candidates."""
    size = search.candidates.stream_bytes(tensor_key, codec)
    losses = search.sensitivities[tensor_key]
    points = convex_hull((search.candidates.stream_bytes(tensor_key, other), loss, other) for other, loss in losses.items())
    smaller = [other for bytes_, _, other in points if bytes_ < size][-1:]
    larger = [other for bytes_, _, other in points if bytes_ > size][:1]
    return smaller + larger
