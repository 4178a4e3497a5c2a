"""``PageLayout``: the position of each value of a page in an engine's memory, detected by calling the engine's own writer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch

from kvpack.formats.arguments import as_integer, as_list, describe
from kvpack.formats.errors import InvalidParameter, InvalidType

from .buffer import PageBuffer, checked_slots
from .geometry import MAX_BYTES, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Writer = Callable[[torch.Tensor, torch.Tensor | None], None]


@dataclass(frozen=True, eq=False)
class PageLayout:
    """The arrangement of a page of ``elements`` values in memory.

    ``positions`` contains the position of each value, int64 ``[layer, head, token, channel]``, for keys and for values.
    """

    geometry: PageGeometry
    elements: int
    positions: dict[str, torch.Tensor]

    @classmethod
    def detect(cls, geometry: PageGeometry, write: Writer, page: torch.Tensor) -> Self:
        """Detect the layout of a page by calling the engine's own writer.

        ``write(k, v)`` writes tensors ``[layer, head, token, channel]`` in the geometry's dtype to ``page``. ``v`` is None for pages
        without values. ``page`` is a contiguous scratch page. Its contents are lost. Values are numbered, and each bit of the numbers is
        written once for each side. Afterward, arbitrary bits must be read back unchanged. The name of a layout would not be enough, because
        pages of equal shape may be arranged differently. Raises InvalidParameter unless the writer is a permutation: it must not lose,
        repeat, overlap or change values.
        """
        if not isinstance(geometry, PageGeometry):
            raise InvalidType(f"geometry is {describe(geometry)}, expected a kvpack.pages.PageGeometry")
        if not callable(write):
            raise InvalidType(f"write is {describe(write)}, expected the engine's writer, a function of (k, v)")
        _check_tensor(page, "page")
        if page.dtype != geometry.torch_dtype:
            raise InvalidType(f"page has dtype {page.dtype}, expected {geometry.dtype}")
        if not page.is_contiguous():
            raise InvalidParameter(f"page has shape {list(page.shape)} and strides {list(page.stride())}, expected contiguous memory")
        flat, dims = page.view(-1), geometry.dims
        shapes = {side: (geometry.layers, geometry.heads, geometry.tokens, dim) for side, dim in dims.items()}

        def write_page(values: dict[str, torch.Tensor], fill: int = 0) -> torch.Tensor:
            as_integers(flat).fill_(fill)
            write(values["k"], values.get("v"))
            return flat.to("cpu")

        zeros = {side: torch.zeros(shape, dtype=page.dtype, device=page.device) for side, shape in shapes.items()}
        places, taken = {}, torch.zeros(flat.numel(), dtype=torch.bool, device="cpu")
        for side, shape in shapes.items():
            numbers = torch.arange(1, zeros[side].numel() + 1, device="cpu").view(shape)
            result = torch.zeros(flat.numel(), dtype=torch.int64, device="cpu")
            for bit in range(numbers.numel().bit_length()):
                ones = (numbers >> bit & 1).to(zeros[side].dtype).to(page.device)
                result += (as_integers(write_page({**zeros, side: ones})) != 0).to(torch.int64) << bit
            at = result.nonzero().flatten()
            order = result[at].argsort()
            if at.numel() != numbers.numel() or not torch.equal(result[at][order], numbers.flatten()):
                raise InvalidParameter(
                    f"{side}: the writer put {numbers.numel()} values at {at.numel()} positions, which hold "
                    f"{len(set(result[at].tolist()))} distinct values: pages can be packed only if each value is stored once"
                )
            if bool(taken[at].any()):
                raise InvalidParameter(
                    f"{side}: the writer put keys and values at the same positions, so its pages cannot be packed: use a writer that keeps "
                    "them apart"
                )
            taken[at] = True
            places[side] = at[order].view(shape)
        layout = cls(geometry, flat.numel(), places)
        random = {side: _random_bits(shape, page.dtype).to(page.device) for side, shape in shapes.items()}
        # Overwrite the bits of another page, which reveals positions that the writer skips.
        bits = as_integers(write_page(random, fill=0x55))
        for side, place in places.items():
            if not torch.equal(bits[place], as_integers(random[side].to("cpu"))):
                raise InvalidParameter(
                    f"{side}: the writer does not copy all values bit for bit, so its pages cannot be packed: use a writer that neither "
                    "scales, converts nor skips values"
                )
        return layout

    @property
    def digest(self) -> str:
        """Digest of the positions of all values. It identifies the layout. Pass it as ``layout`` to ``Identity.of_engine``."""
        data = b"".join(f"{side} {list(place.shape)}".encode() + place.numpy().tobytes() for side, place in self.positions.items())
        return hashlib.sha256(data).hexdigest()

    @cached_property
    def offsets_and_strides(self) -> dict[str, tuple[int, tuple[int, int, int, int]]] | None:
        """The offset of the first value and the stride of each axis, for keys and for values.

        None if strides cannot describe the layout.
        """
        result = {}
        for side, place in self.positions.items():
            first = int(place[0, 0, 0, 0])
            steps = []
            expected = torch.tensor(first, dtype=torch.int64, device="cpu")
            for axis, size in enumerate(place.shape):
                index = [0, 0, 0, 0]
                index[axis] = min(1, size - 1)
                steps.append(int(place[tuple(index)]) - first)
                expected = expected.unsqueeze(-1) + torch.arange(size, device="cpu") * steps[-1]
            # PyTorch does not support negative strides.
            if not torch.equal(expected, place) or min(steps) < 0:
                return None
            result[side] = first, (steps[0], steps[1], steps[2], steps[3])
        return result

    def buffer(self, pool: torch.Tensor) -> PageBuffer:
        """Return a view of ``pool``, an engine's memory ``[slot, value]``, as a ``PageBuffer``. Nothing is copied.

        Raises InvalidParameter if strides cannot describe the layout. In that case, copy pages with ``gather`` and ``scatter``.
        """
        self._check_pool(pool)
        if self.offsets_and_strides is None:
            raise InvalidParameter(
                "strides cannot describe the layout, which has blocks of tokens within a head: use gather and scatter"
            )
        views = {}
        for side, (first, steps) in self.offsets_and_strides.items():
            shape = (pool.shape[0], *self.positions[side].shape)
            strides = (pool.stride(0), *(step * pool.stride(1) for step in steps))
            views[side] = pool.as_strided(shape, strides, pool.storage_offset() + first * pool.stride(1))
        return PageBuffer(self.geometry, views["k"], views.get("v"))

    def staging(self, slots: int) -> PageBuffer:
        """Allocate host memory for ``slots`` pages, for use with ``gather`` and ``scatter``."""
        slots = as_integer(slots, "slots")
        if not 0 <= slots * self.geometry.raw_bytes <= MAX_BYTES:
            raise InvalidType(f"slots is {describe(slots)}, expected a number of pages that fits in memory")
        sides = [torch.empty(slots, *place.shape, dtype=self.geometry.torch_dtype, device="cpu") for place in self.positions.values()]
        return PageBuffer(self.geometry, *sides)

    def gather(self, pool: torch.Tensor, slots: Sequence[int], staging: PageBuffer) -> None:
        """Copy the pages in ``slots`` of ``pool``, ``[slot, value]``, to the first slots of ``staging``.

        Raises InvalidParameter or OutOfBounds if ``slots`` or ``staging`` does not match the pool.
        """
        for number, slot in enumerate(self._check_arguments(pool, slots, staging)):
            for side, place in self.positions.items():
                values = as_integers(pool[slot])[place]
                for layer, target in enumerate(staging.sides[side]):
                    as_integers(target)[number].copy_(values[layer])

    def scatter(self, staging: PageBuffer, pool: torch.Tensor, slots: Sequence[int]) -> None:
        """Copy the first slots of ``staging`` to the pages in ``slots`` of ``pool``, ``[slot, value]``.

        Raises InvalidParameter or OutOfBounds if ``slots`` or ``staging`` does not match the pool.
        """
        chosen = self._check_arguments(pool, slots, staging, written=True)
        with torch.inference_mode():
            for number, slot in enumerate(chosen):
                for side, place in self.positions.items():
                    values = torch.stack([as_integers(source)[number] for source in staging.sides[side]])
                    as_integers(pool)[slot].index_put_((place,), values)

    def _check_arguments(self, pool: torch.Tensor, slots: Sequence[int], staging: PageBuffer, written: bool = False) -> list[int]:
        """Check that ``pool`` and ``staging`` have room for the slots. Returns the slots as integers."""
        self._check_pool(pool)
        if not isinstance(staging, PageBuffer):
            raise InvalidType(f"staging is {describe(staging)}, expected a PageBuffer: create one with PageLayout.staging")
        slots = as_list(slots, "slots", "slots, which are integers")
        if staging.geometry != self.geometry or staging.slots < len(slots):
            raise InvalidParameter(
                f"staging has {staging.slots} slots of {staging.geometry}, expected at least {len(slots)} slots of {self.geometry}"
            )
        return checked_slots(slots, pool.shape[0], written)

    def _check_pool(self, pool: torch.Tensor) -> None:
        _check_tensor(pool, "the pool")
        if pool.dim() != 2 or pool.shape[1] != self.elements or pool.dtype != self.geometry.torch_dtype:
            raise InvalidParameter(
                f"the pool is {pool.dtype} {list(pool.shape)}, expected {self.geometry.dtype} [slot, {self.elements}]: reshape it with view"
            )


def _check_tensor(x: Any, name: str) -> None:
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.is_meta:
        raise InvalidType(f"{name} is {describe(x)}, expected a dense tensor in memory")


def as_integers(x: torch.Tensor) -> torch.Tensor:
    """Return a view of ``x`` as integers with the same bits. Some dtypes cannot be indexed, and NaN does not equal itself."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def _random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return values with random bits, including negative zeros and subnormals, but no NaN. The global random state does not change."""
    generator = torch.Generator().manual_seed(0)
    last = (*shape[:-1], shape[-1] * dtype.itemsize)
    result = torch.randint(256, last, dtype=torch.uint8, generator=generator, device="cpu").view(dtype)
    if dtype != torch.uint8:
        bits = as_integers(result)
        bits.masked_fill_(~result.to(torch.float32).isfinite(), torch.iinfo(bits.dtype).min or 0x80)
    return result
