"""Analyzes a model's code to find out if it needs dense keys and values.

Packed keys and values can only be passed to attention, with options that it supports.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from .model_state import iterate_modules

WITHOUT_COUNTERPART = {
    "position_bias": "a position bias",
    "indices": "the indices of the keys to attend to",
    "block_indices": "the indices of the blocks to attend to",
    "sinks": "sinks that are not logits",
    "cu_seq_lens_q": "several sequences in one row",
    "cu_seq_lens_k": "several sequences in one row",
}
"""Options of attention functions that ``attend`` does not support."""

_ATTENTION = "attention_interface"
"""Name of the configured attention function in transformers' models."""


def reads_kv(model: torch.nn.Module) -> bool:
    """Return True if a module of ``model`` uses the results of ``Cache.update`` for more than passing them to attention.

    Passing an option of ``WITHOUT_COUNTERPART`` to attention also counts.
    """
    return any(read.reads_kv for read in _analyze_methods(model))


def omits_window(model: torch.nn.Module) -> bool:
    """Return True if a module of ``model`` calls attention without the option ``sliding_window``.

    Only the mask then restricts which tokens it attends to.
    """
    return any(read.no_window for read in _analyze_methods(model))


class _Analysis(NamedTuple):
    """The result of analyzing one function.

    ``reads_kv`` is True if the function uses the keys and values that ``Cache.update`` returns for more than passing them to attention.
    ``no_window`` is True if it calls attention without a window.
    """

    reads_kv: bool
    no_window: bool


def _analyze_methods(model: torch.nn.Module) -> Iterator[_Analysis]:
    classes = {type(module) for module in iterate_modules(model) if not isinstance(module, PreTrainedModel)}
    return (_analyze(function) for kind in classes for function in _own_methods(kind))


def _own_methods(kind: type) -> Iterable[FunctionType]:
    """Return the methods of a class that are not defined by PyTorch."""
    parents = [parent for parent in kind.__mro__ if not parent.__module__.startswith("torch.")]
    names = {name: value for parent in reversed(parents) for name, value in vars(parent).items()}
    return (inspect.unwrap(value) for value in names.values() if isinstance(value, FunctionType))


@lru_cache(maxsize=4096)
def _analyze(function: Any) -> _Analysis:
    if "update" not in function.__code__.co_names:
        return _Analysis(False, False)
    # Faster than inspect.getsource, which first searches all modules.
    lines = linecache.getlines(function.__code__.co_filename)[function.__code__.co_firstlineno - 1 :]
    try:
        tree = ast.parse(textwrap.dedent("".join(inspect.getblock(lines))))
    except (SyntaxError, IndexError):
        # Without source code, assume that the function is like most of transformers' own.
        return _Analysis(False, False)
    updates = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and _is_update(node)]
    names = {name.id for update in updates for name in ast.walk(update.targets[0]) if isinstance(name, ast.Name)}
    first = min((update.lineno for update in updates), default=0)
    given = [{keyword.arg for keyword in node.keywords} for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_attention(node)]
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    read = (
        isinstance(node, ast.Name)
        and node.id in names
        and isinstance(node.ctx, ast.Load)
        and node.lineno > first
        and not _is_only_passed_on(list(_ancestors(node, parents)), updates)
        for node in ast.walk(tree)
    )
    biased = any(not options.isdisjoint(WITHOUT_COUNTERPART) for options in given)
    return _Analysis(bool(updates) and (biased or any(read)), any("sliding_window" not in options for options in given))


def _is_update(node: ast.Assign) -> bool:
    """Return True if a statement is ``keys, values = cache.update(keys, values, layer)``."""
    return (
        isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "update"
        and len(node.value.args) > 1
    )


def _is_only_passed_on(above: list[ast.AST], updates: Iterable[ast.AST]) -> bool:
    """Return True if a name is only passed to attention or stored. ``above`` contains the nodes around it, innermost first."""
    holder = above[1] if isinstance(above[0], ast.keyword) else above[0]
    if isinstance(holder, ast.Tuple) or _is_attention(holder) or any(node in updates for node in above):
        return True
    # This branch is for another attention; its else branch calls the one that is set.
    branches = (node for node in above if isinstance(node, ast.If) and node.orelse)
    return any(_is_attention(node) for branch in branches for other in branch.orelse for node in ast.walk(other))


def _is_attention(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == _ATTENTION


def _ancestors(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in parents:
        node = parents[node]
        yield node
