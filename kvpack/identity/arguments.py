"""Interprets the argument ``model=``, which identifies the model of a cache. Unlike the identity, it needs PyTorch to be imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from kvpack.file.checks import TEXT_BY_NAME, check_argument
from kvpack.formats.errors import InvalidType

from .identity import Identity

ModelArgument: TypeAlias = torch.nn.Module | Identity | str | Mapping[str, str]
"""A transformers model, an identity, a model's name, or the fields that another cache records (``Cache.model``)."""


def model_fields(model: ModelArgument | None) -> dict[str, str]:
    """Return the fields that identify ``model`` in a cache. For None, the result is empty.

    Raises InvalidType for a value of any other type, and InvalidParameter if ``Identity.of`` rejects the model or a header cannot store the
    fields.
    """
    result: dict[str, Any]
    if model is None:
        return {}
    if isinstance(model, str):
        result = {"name": model}
    elif isinstance(model, Identity):
        result = model.header_model
    elif isinstance(model, Mapping):
        result = dict(model)
    elif isinstance(model, torch.nn.Module):
        result = Identity.of(model, "raw").header_model
    else:
        raise InvalidType(
            f"model is a {type(model).__name__}, expected a transformers model, a kvpack.Identity, a name, or a map of names to text such "
            "as {'name': 'llama'}"
        )
    check_argument("model", result, TEXT_BY_NAME)
    return result
