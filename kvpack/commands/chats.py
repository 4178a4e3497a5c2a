"""Loads the model and tokenizer for the commands cache and generate."""

from __future__ import annotations

import argparse
from typing import Any

from kvpack.formats.errors import InvalidParameter

DEVICES = ("cpu", "cuda")


def add_device(parser: argparse.ArgumentParser, dtype: str = "") -> None:
    """Add the option ``--device``. ``dtype`` is the model's dtype to name in the help text, if it is not the dtype of the weights."""
    loaded = f", in {dtype}" if dtype else ""
    parser.add_argument("--device", choices=DEVICES, help=f"device of the model{loaded} (default: cuda if there is one, otherwise cpu)")


def chosen_device(arguments: argparse.Namespace) -> str:
    """Return the value of the option ``--device``. Raises InvalidParameter for cuda if there is no CUDA device."""
    import torch

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter("--device is cuda, but PyTorch found no CUDA device: omit --device to use the CPU")
    return str(device)


def add_compact(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--compact``, which has the same meaning as in ``Chat.save``."""
    parser.add_argument("--compact", action="store_true", help="also pack the newest keys, which otherwise stay raw, and compress tensors")


def load_chat_model(model: str | None, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Load a model in the dtype of its weights, and its tokenizer. If ``model`` is None, load the demo's model.

    Raises the same errors as ``kvpack.models.load_model``.
    """
    from kvpack.models import BOS, ByteTokenizer, load_model, load_tokenizer, model_folder

    device = chosen_device(arguments)
    with model_folder(model) as folder:
        network, tokenizer = load_model(folder, dtype="auto").to(device), load_tokenizer(folder)
    if tokenizer is None:
        if network.get_input_embeddings().weight.shape[0] <= BOS:
            raise InvalidParameter(
                f"{folder} has no tokenizer, and the model has too few token ids to encode text as bytes: pass a folder with a tokenizer"
            )
        tokenizer = ByteTokenizer()
    return network, tokenizer
