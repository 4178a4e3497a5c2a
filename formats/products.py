"""Float32 matrix products that ignore the precision settings of the process (spec/packing.md, Rotation)."""

from __future__ import annotations

from typing import Any

from .lazy import torch

MIN_ROWS = 16
"""Minimum number of rows of a product on the CPU. For fewer rows, libraries use other kernels, which add in a different order."""


def product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return ``rows @ matrix`` for float32 ``[..., row, k]`` and ``[..., k, column]``, with the rounding errors of float32 sums.

    If PyTorch's settings allow products to round their factors to tf32 or bf16, the product is computed in float64. On the CPU, the product
    of a row does not depend on the number of rows.
    """
    if rows.device.type != "cpu" or may_round_factors("cpu"):
        return plain_product(rows, matrix)
    count = rows.shape[-2]
    if count >= MIN_ROWS:
        return rows @ matrix
    return (torch.nn.functional.pad(rows, (0, 0, 0, MIN_ROWS - count)) @ matrix)[..., :count, :]


def plain_product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return ``rows @ matrix`` as ``product`` does, except that the result for a row may depend on the number of rows."""
    if may_round_factors(rows.device.type):
        return (rows.to(torch.float64) @ matrix.to(torch.float64)).to(torch.float32)
    return rows @ matrix


def may_round_factors(device_type: str) -> bool:
    """Return True if float32 products on this type of device may round their factors (see ``torch.set_float32_matmul_precision``)."""
    backends: Any = torch.backends
    backend = backends.cuda if device_type == "cuda" else backends.mkldnn
    # PyTorch 2.9 and newer have a setting for each backend, and raise for the old setting if both were used.
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    if precision == "none":
        precision = backends.fp32_precision
    return precision not in {"ieee", "none"}
