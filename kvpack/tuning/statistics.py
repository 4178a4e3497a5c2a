"""Calibration statistics from windows of text: means, covariances and samples of keys and values, and costs of their errors.

The cost is the Fisher information: gradients, with respect to keys and values, of the log-probability of a next token that is sampled from
the model's own prediction (Martens 2020, Sec. 5). Predictions at higher temperatures are sampled as well. If the model is certain,
gradients for a likely token are almost zero, no matter what an error would change.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch.nn import functional

from kvpack import cache_names
from kvpack.cache import tensor_files
from kvpack.evaluation.windows import attention_shares
from kvpack.file.atomic import write_file
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.raw_positions import RawPositions
from kvpack.formats.token_norms import norms_per_head

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpack.formats.frames import Rope

Pairs = list[tuple[torch.Tensor, torch.Tensor]]

TEMPERATURES = (1.0, 3.0, 10.0)
"""Temperatures at which next tokens are sampled. All contribute equally to the cost."""

RAW_TOKENS = RawPositions(1, "bf16", 4, 0.6, 4.0)
"""Rule for the tokens that are not counted: attention sinks, whose values are not representative.

They are the raw tokens of recipes such as klt-1.75 (``presets.CALIBRATED_RAW_CLAUSE``), and the first four tokens.
"""

PREFIXES = 4
"""Number of prefixes of a window after which tokens are predicted.

RoPE rotates queries by their position, so an error in one channel of a key affects queries at some positions more than at others.
"""

SAMPLED_OF_FRAMES = 8
"""Sampling interval for frames: one in this many sampled tokens also trains the tables of frames."""

PAGE_TOKENS = 128
"""Number of tokens per page. kvpack's own presets subtract the page's mean from keys (``presets.kvpack_codec``)."""

_FORMAT = "kvpack calibration with pages"
_SUMS = ("counts", "sums", "products", "costs", "shares", "moments")

_MAX_HEADER_BYTES = 2**26
"""Maximum size of a header in bytes. It lists samples for each window, layer and side."""


@dataclass(frozen=True)
class Framing:
    """The scope of frames: a frame covers the channels of a head or of a layer. Keys are transformed before their layer's RoPE."""

    scope: str
    ropes: Sequence[Rope | None]

    def view(self, layer: int, side: str, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` ``[batch, kv_head, token, dim]`` as ``[batch, frame, token, channel]``, with RoPE undone if ``side`` is "k".

        ``x`` contains keys, values or gradients. Its first token must be at position 0.
        """
        rope = self.ropes[layer] if side == "k" else None
        x = x if rope is None else rope.rotate(x.to(torch.float32), 0, inverse=True)
        return x if self.scope == "head" else x.transpose(1, 2).flatten(2)[:, None]


@dataclass
class KeyMoments:
    """Sums over the keys of a layer and over the queries that attend to them, in float64, for each KV head.

    ``tokens`` is the number of keys, and ``rows`` is the number of queries. ``keys``, ``pages`` and ``queries``, ``[kv_head, dim, dim]``,
    are sums of outer products: of keys, of keys minus the mean of their page of ``PAGE_TOKENS`` tokens, and of queries.
    ``keys_before_rope``, ``[kv_head, dim]``, is the sum of keys before RoPE.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    keys: torch.Tensor
    queries: torch.Tensor
    pages: torch.Tensor
    keys_before_rope: torch.Tensor

    @classmethod
    def from_keys(cls, k: torch.Tensor, queries: torch.Tensor, rows: int, rope: Rope | None) -> KeyMoments:
        """Compute the moments of keys ``[1, kv_head, token, dim]``, which begin at position 0. Raw tokens do not count.

        ``queries`` is the sum of outer products of ``rows`` queries.
        """
        counted = _encoded_tokens(k)
        x = k[0].to(torch.float64)[:, counted]
        before = x if rope is None else rope.rotate(k[0].to(torch.float32), 0, inverse=True).to(torch.float64)[:, counted]
        count = torch.tensor(float(rows), dtype=torch.float64, device="cpu")
        return cls(counted.sum().to(torch.float64), count, x.transpose(1, 2) @ x, queries, _products_in_pages(k, counted), before.sum(1))

    def __add__(self, other: KeyMoments) -> KeyMoments:
        return KeyMoments(*(getattr(self, name) + getattr(other, name) for name in MOMENTS))


MOMENTS = tuple(one.name for one in fields(KeyMoments))


class QueryMoments:
    """Sums of outer products of a window's queries by layer. Query heads that share a KV head are added up."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self._heads: dict[int, torch.Tensor] = {}

    def observe(self, layer: int, queries: torch.Tensor) -> None:
        """Add a layer's queries, ``[1, q_head, token, dim]``."""
        q = queries[0].to(torch.float64)
        self._heads[layer] = q.transpose(1, 2) @ q
        self.rows[layer] = q.shape[1]

    def of_layer(self, layer: int, heads: int) -> tuple[torch.Tensor, int] | None:
        """Return the sums ``[kv_head, dim, dim]`` for a layer, and the number of queries in each, or None if there are no queries."""
        result = self._heads.get(layer)
        if result is None or len(result) % heads:
            return None
        return result.view(heads, -1, *result.shape[1:]).sum(1), self.rows[layer] * len(result) // heads


@dataclass
class Statistics:
    """Sums over tokens, by layer and side ("3.k", or "3.k.frames" for frames). ``calibration_id`` is a digest of the model and the text.

    Windows may be on any device. All tensors here are on the CPU.

    Attributes:
        counts: Numbers of counted tokens, float64 ``[]``.
        sums: Sums of keys or values, float64 ``[kv_head, dim]``.
        products: Sums of their outer products, ``[kv_head, dim, dim]``.
        costs: Sums of outer products of gradients, ``[temperature, kv_head, dim, dim]``.
        samples: Samples of keys or values per window, float32 ``[kv_head, token, dim]``.
        shares: Attention weight on tokens that were not counted, summed over windows, by layer ("3"). Empty if unknown.
        moments: ``KeyMoments`` by layer, half of the windows and name ("3.0.keys"). Even windows are one half, odd ones the other.
    """

    calibration_id: str
    windows: int = 0
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    products: dict[str, torch.Tensor] = field(default_factory=dict)
    costs: dict[str, torch.Tensor] = field(default_factory=dict)
    samples: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    shares: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, model: Any, tokens: torch.Tensor, pairs: Pairs, seed: int, sampled: int, framing: Framing | None = None) -> None:
        """Add a window, ``tokens`` ``[1, token]``. ``pairs`` contains the keys and values of its first tokens.

        All other tokens are predicted after each of the ``prefixes``. ``sampled`` tokens are kept as samples. With ``framing``, statistics
        of frames are also added. Raises InvalidParameter if predictions are not finite, or do not depend on any keys or values.
        """
        generator = torch.Generator(tokens.device).manual_seed(seed)
        raw = [~_encoded_tokens(k) for k, _ in pairs]
        for number, share in enumerate(attention_shares(model, tokens, pairs, raw)):
            _add_to_sum(self.shares, str(number), torch.tensor(share, dtype=torch.float64, device="cpu"))
        count = pairs[0][0].shape[2]
        depends = False
        costs: dict[str, torch.Tensor] = {}
        for first, predicted in prefixes(count, tokens.shape[1] - count):
            known = [(k[:, :, :first], v[:, :, :first]) for k, v in pairs]
            for number, pair in enumerate(_gradients(model, tokens[:, : first + predicted], known, generator)):
                depends = depends or any(bool(gradient.any()) for gradient in pair)
                for name, gradient in self._named_views(number, pair, framing):
                    cost = _outer_products(gradient, ~raw[number][:first])
                    costs[name] = costs[name] + cost if name in costs else cost
        for name, cost in costs.items():
            _add_to_sum(self.costs, name, cost)
        _check_dependence(depends, tokens.shape[1] - count)
        order = torch.randperm(count, generator=generator, device=tokens.device)
        for number, pair in enumerate(pairs):
            chosen = order[~raw[number][order]][:sampled]
            few = chosen[: -(-sampled // SAMPLED_OF_FRAMES)]
            for name, values in self._named_views(number, pair, framing):
                self._add_tensor(name, values, ~raw[number], few if name.endswith(".frames") else chosen)

    def add_moments(self, window: int, pairs: Pairs, queries: QueryMoments, ropes: Sequence[Rope | None] | None) -> None:
        """Add the moments of a window's keys and queries. Nothing is added if a layer has no queries."""
        query_parts = [queries.of_layer(number, k.shape[1]) for number, (k, _) in enumerate(pairs)]
        if any(part is None for part in query_parts):
            return
        for number, part in enumerate(query_parts):
            assert part is not None
            key_moments = KeyMoments.from_keys(pairs[number][0], *part, None if ropes is None else ropes[number])
            for name in MOMENTS:
                _add_to_sum(self.moments, f"{number}.{window % 2}.{name}", getattr(key_moments, name))

    def halves(self) -> list[tuple[KeyMoments, KeyMoments]] | None:
        """Return each layer's moments in even and in odd windows, or None if there are none. After one window, the second half is zero."""
        if not self.moments:
            return None
        layers = 1 + max(int(name.partition(".")[0]) for name in self.moments)
        return [(self._moments(layer, 0), self._moments(layer, 1)) for layer in range(layers)]

    def _moments(self, layer: int, half: int) -> KeyMoments:
        first = {name: self.moments[f"{layer}.0.{name}"] for name in MOMENTS}
        tensors = (self.moments.get(f"{layer}.{half}.{name}") for name in MOMENTS)
        return KeyMoments(*(torch.zeros_like(first[name]) if part is None else part for name, part in zip(MOMENTS, tensors, strict=True)))

    @staticmethod
    def _named_views(
        layer_index: int, pair: tuple[torch.Tensor, torch.Tensor], framing: Framing | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, view) pairs for a layer's keys and values. With ``framing``, also yield them for the frames of both.

        The views are ``[batch, part, token, channel]``.
        """
        for side, values in zip("kv", pair, strict=True):
            yield f"{layer_index}.{side}", values
            if framing is not None:
                yield f"{layer_index}.{side}.frames", framing.view(layer_index, side, values)

    def _add_tensor(self, name: str, values: torch.Tensor, counted: torch.Tensor, chosen: torch.Tensor) -> None:
        x = values[0].to(torch.float64)[:, counted]
        _add_to_sum(self.counts, name, counted.sum().to(torch.float64))
        _add_to_sum(self.sums, name, x.sum(1))
        _add_to_sum(self.products, name, x.transpose(1, 2) @ x)
        self.samples.setdefault(name, []).append(values[0][:, chosen].to(torch.float32).cpu())

    def write(self, path: str) -> None:
        tensors = {f"samples.{name}.{n}": tensor for name, parts in self.samples.items() for n, tensor in enumerate(parts)}
        for kind in _SUMS:
            tensors |= {f"{kind}.{name}": values.contiguous() for name, values in getattr(self, kind).items()}
        metadata = {"format": _FORMAT, "of": self.calibration_id, "windows": str(self.windows)}
        write_file(path, [memoryview(save(tensors, metadata))])

    @classmethod
    def read(cls, path: str, calibration_id: str) -> Statistics:
        """Return the statistics in the file ``path``, or empty ones if it does not exist.

        Raises InvalidParameter if the file is of another kind or for another calibration.
        """
        result = cls(calibration_id)
        if not os.path.lexists(path):
            return result

        def counted(_: list[str], metadata: dict[str, str]) -> int:
            if metadata.get("format") != _FORMAT or metadata.get("of") != calibration_id:
                raise InvalidParameter(f"{path} belongs to a calibration with a different model, text, size or device: remove the file")
            try:
                return int(metadata["windows"])
            except (KeyError, ValueError) as error:
                raise InvalidParameter(f"{path} is not valid progress of a calibration ({error!r}): remove the file") from None

        tensors, result.windows = tensor_files.read(path, counted, _MAX_HEADER_BYTES)
        for key, tensor in tensors.items():
            kind, _, name = key.partition(".")
            if kind == "samples":
                result.samples.setdefault(name.rpartition(".")[0], []).append(tensor)
            elif kind in _SUMS:
                getattr(result, kind)[name] = tensor
        return result


def prefixes(count: int, predicted: int) -> list[tuple[int, int]]:
    """Return (prefix tokens, predicted tokens) pairs, shortest prefix first. The longest prefix has ``count`` tokens.

    Some tokens are predicted after each prefix, ``predicted`` in total. If there are few tokens, there are fewer than ``PREFIXES`` pairs.
    """
    parts = min(PREFIXES, predicted, count)
    return [(-(-count * part // parts), predicted * part // parts - predicted * (part - 1) // parts) for part in range(1, parts + 1)]


def _check_dependence(depends: bool, scored_tokens: int) -> None:
    """Raise InvalidParameter if predictions do not depend on earlier keys or values (``depends`` is False)."""
    if not depends:
        raise InvalidParameter(
            f"the {scored_tokens} predicted tokens of a window attend to no earlier tokens, as with chunked attention: "
            "calibrate with a different --tokens or --score"
        )


def _add_to_sum(sums: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    sums[name] = values.cpu() if name not in sums else sums[name] + values.cpu()


def _encoded_tokens(k: torch.Tensor) -> torch.Tensor:
    """Return a mask of the tokens that are not kept raw, bool ``[token]``, for keys ``[1, kv_head, token, dim]``."""
    raw = RAW_TOKENS.choose(norms_per_head(k), 0)[0]
    return ~raw if not raw.all() else torch.ones_like(raw)


def _products_in_pages(k: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return the sum of outer products of counted keys minus their page's mean, float64 ``[kv_head, dim, dim]``."""
    # Zeros add nothing to the products. Selecting the counted tokens of every page would make the host wait for a device each time.
    rest = -len(counted) % PAGE_TOKENS
    mask = functional.pad(counted, (0, rest)).view(-1, PAGE_TOKENS, 1)
    values = functional.pad(k[0].to(torch.float64), (0, 0, 0, rest)).view(len(k[0]), -1, PAGE_TOKENS, k.shape[3]) * mask
    means = values.sum(2, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)
    x = ((values - means) * mask).flatten(1, 2)
    return x.mT @ x


def _outer_products(gradient: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return the sum of outer products of gradients over counted tokens, float64 ``[temperature, part, dim, dim]``."""
    g = gradient.to(torch.float64) * counted[:, None]
    return g.mT @ g


def _gradients(model: Any, tokens: torch.Tensor, pairs: Pairs, generator: torch.Generator) -> Pairs:
    """Return the gradients of log-probabilities of sampled next tokens with respect to ``pairs``, each ``[temperature, kv_head, token,
    dim]``.
    """
    from transformers import DynamicCache

    leaves = [(k.detach().clone().requires_grad_(), v.detach().clone().requires_grad_()) for k, v in pairs]
    flat, over = [leaf for pair in leaves for leaf in pair], cache_names.cache_argument(model, DynamicCache(leaves))
    with torch.enable_grad():
        logits = model(tokens[:, pairs[0][0].shape[2] :], **over).logits[0].float()
        if not bool(logits.isfinite().all()):
            raise InvalidParameter("the model's predictions in a window of the text are infinite or NaN: load it in bfloat16 or float32")
        result = [leaf.new_empty(len(TEMPERATURES), *leaf.shape[1:]) for leaf in flat]
        for number, temperature in enumerate(TEMPERATURES):
            log_probabilities = functional.log_softmax(logits / temperature, -1)
            drawn = torch.multinomial(log_probabilities.detach().exp(), 1, generator=generator)
            gradients = torch.autograd.grad(log_probabilities.gather(1, drawn).sum(), flat, retain_graph=True)
            for target, gradient in zip(result, gradients, strict=True):
                target[number] = gradient[0]
    return list(zip(result[::2], result[1::2], strict=True))
