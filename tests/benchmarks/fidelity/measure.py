"""The functions with which all figures are measured. They encode and decode with the codecs that write files."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvpack.coding.encoding import encode
from kvpack.coding.recipes import parse_recipe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.formats.base import Codec

DIM = 128
"""Head dim of all figures that do not specify one."""

_RATE_HEADS = 8
_RATE_TOKENS = 256
# Above all seeds of rotations, so that the two are independent.
_QJL_SEEDS = 1 << 60


@dataclass(frozen=True)
class Settings:
    """Settings of the measurements.

    ``seed`` is the seed from which all random draws are derived. If ``quick`` is True, each measurement uses the smaller of its two sizes.
    """

    seed: int = 0
    quick: bool = False

    def size(self, full: int, quick: int) -> int:
        """Return ``quick`` if the settings ask for quick measurements, else ``full``."""
        return quick if self.quick else full

    def draw(self, number: int) -> int:
        """Return the seed of draw ``number``, which is used for keys and for rotations."""
        return self.seed << 20 | number

    def generator(self, number: int) -> torch.Generator:
        """Return a generator that is seeded for draw ``number``."""
        return torch.Generator().manual_seed(self.draw(number))


def codec(words: str, dim: int = DIM, side: str = "k") -> Codec:
    """Return the codec for ``side`` with the options ``words``, such as "scalar:b=2,norm=fp32", and the papers' norm rule."""
    return parse_recipe(f"kv={words},norm_rule=norm").codec(0, 1, side, dim)


def seeded(words: str, settings: Settings, number: int) -> str:
    """Return ``words`` with the seeds of draw ``number`` for the codec's rotation and for that of a qjl sidecar."""
    seed = settings.draw(number)
    return f"{words},seed={seed}" + (f",qjl_seed={_QJL_SEEDS | seed}" if ",qjl=" in words else "")


def decoded(words: str, x: torch.Tensor) -> torch.Tensor:
    """Encode ``x`` to packed streams and return the decoded float32 ``[..., token, dim]``. The leading axes are heads."""
    four = x.reshape(1, -1, *x.shape[-2:])
    chosen = codec(words, x.shape[-1])
    return chosen.decode(encode(chosen, four, words)).view_as(x)


@dataclass(frozen=True)
class Rate:
    """Bits per value of each stream.

    ``stored`` has the bits as stored. For code streams, there are also the bits of an ideal packing of every alphabet.
    """

    stored: Mapping[str, float]
    alphabets: Mapping[str, float]

    @property
    def total(self) -> float:
        """Bits of all streams as stored."""
        return sum(self.stored.values())

    @property
    def codes(self) -> float:
        """Bits of the code streams as stored."""
        return sum(bits for name, bits in self.stored.items() if name in self.alphabets)

    @property
    def counted(self) -> float:
        """Bits as papers count them: the logarithm of the alphabet's size for codes, and the stored bits for all other streams."""
        return sum(self.alphabets.values()) + self.total - self.codes


@cache
def rate(chosen: Codec) -> Rate:
    """Return the codec's rate for 8 heads of 256 Gaussian tokens."""
    return rate_of(chosen, torch.randn(1, _RATE_HEADS, _RATE_TOKENS, chosen.dim, generator=torch.Generator().manual_seed(0)))


def rate_of(chosen: Codec, x: torch.Tensor) -> Rate:
    """Return the rate computed from the number of bytes that encode ``x`` ``[batch, head, token, dim]``."""
    stored: Counter[str] = Counter()
    for name, stream in encode(chosen, x, "the benchmark's keys").items():
        stored[name.split(".")[0]] += 8 * stream.nbytes
    packings = chosen.packings()
    alphabets = {name: packing.symbols * math.log2(math.prod(packing.alphabets)) / chosen.dim for name, packing in packings.items()}
    return Rate({name: bits / x.numel() for name, bits in stored.items()}, alphabets)


def mean_square_error(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the mean squared error per value."""
    return (x - y).square().mean(dtype=torch.float64).item()


class Errors(NamedTuple):
    """Errors averaged over seeds. ``tail95`` is the 95th percentile of the MSE of a key."""

    cosine: float
    mse: float
    inner_product: float
    tail95: float


def errors(words: str, settings: Settings, seeds: int, keys: int, queries: int) -> Errors:
    """Return the errors of the codec ``words`` for isotropic Gaussian keys and queries, with a different rotation for each seed."""
    found = []
    for number in range(seeds):
        generator = settings.generator(number)
        k, q = torch.randn(keys, DIM, generator=generator), torch.randn(queries, DIM, generator=generator)
        y = decoded(seeded(words, settings, number), k)
        found.append(
            (
                torch.cosine_similarity(k, y, dim=-1).mean(dtype=torch.float64).item(),
                mean_square_error(k, y),
                (q @ (k - y).T).abs().mean(dtype=torch.float64).item(),
                (k - y).square().mean(-1).quantile(0.95).item(),
            )
        )
    return Errors(*(sum(column) / seeds for column in zip(*found, strict=True)))
