"""The objects that a KvpackCache passes to a model in place of keys and values."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from kvpack.formats.errors import InvalidParameter, OutOfBounds


class CapturedStep(NamedTuple):
    """The inputs of a decode step that a CUDA graph captures.

    ``starts`` is the first token that each sequence attends to, int32 ``[batch]``, or None if all sequences attend to all tokens.
    ``tokens`` is an arbitrary number of tokens, which must not affect the graph.
    """

    starts: torch.Tensor | None
    tokens: int


class PackedLength(int):
    """The number of keys for a mask, if the keys are packed and kvpack's attention does not need a mask.

    ``first_visible`` returns the first token that a layer with this mask attends to. Layers may contain more tokens than the layer that
    was queried. ``leave_to_attention`` records that the model's own attention would have a mask, although packed attention needs none.
    ``check_mask`` receives the attention mask of the pass. If a CUDA graph captures the step, ``captured`` is set.
    """

    first_visible: Callable[[], int] = staticmethod(lambda: 0)
    leave_to_attention: Callable[[bool], None] = staticmethod(lambda masked: None)
    check_mask: Callable[[torch.Tensor | None], None] = staticmethod(lambda mask: None)
    captured: CapturedStep | None = None


class CapturedLength(PackedLength):
    """The number of tokens that a captured step receives, which differs from the number in every replay.

    Python code compares it only during the capture, but each replay has one more token than the previous one. A comparison therefore raises
    InvalidParameter if its result would be different for a larger number.
    """

    def _require_stable(self, result: bool, stable: bool) -> bool:
        """Return ``result`` if it is also the result for all larger lengths, ``stable``. Otherwise, raise InvalidParameter."""
        if result is not stable:
            raise InvalidParameter(
                "the model compares the cache length in Python, so a captured step could take the wrong branch as the cache grows"
            )
        return result

    def __lt__(self, other: Any) -> Any:
        return self._require_stable(int(self) < other, False)

    def __le__(self, other: Any) -> Any:
        return self._require_stable(int(self) <= other, False)

    def __gt__(self, other: Any) -> Any:
        return self._require_stable(int(self) > other, True)

    def __ge__(self, other: Any) -> Any:
        return self._require_stable(int(self) >= other, True)

    def __eq__(self, other: object) -> bool:
        # A later replay has any greater length, so an equality test may become true.
        return self._require_stable(isinstance(other, int) and int(self) <= int(other), False)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def __add__(self, other: int) -> Any:
        return self._with_tokens(int(self) + other)

    __radd__ = __add__

    def __sub__(self, other: int) -> Any:
        return self._with_tokens(int(self) - other)

    def _with_tokens(self, tokens: Any) -> Any:
        if type(tokens) is not int:
            return tokens
        result = type(self)(tokens)
        result.captured = self.captured
        return result


class CompiledLength:
    """The length of a mask in compiled code. An integer would cause a recompilation for each length.

    ``sizes`` returns the length and the position of the first key. ``starts(columns)`` returns the first token that each sequence attends
    to with the padding mask ``columns``, int32 ``[batch]``.
    """

    def __init__(self, sizes: Callable[[], tuple[int, int]], starts: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.sizes, self.starts = sizes, starts


def eager_only(reason: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator for functions that torch.compile must leave to eager code.

    From PyTorch 2.7 on, ``reason`` appears in the error of ``fullgraph=True``.
    """
    options = {"reason": reason} if "reason" in inspect.signature(torch.compiler.disable).parameters else {}
    return partial(torch.compiler.disable, **options)


class PackedStates:
    """A placeholder for layer ``layer_index`` of a KvpackCache, to which ``k`` and ``v`` were appended.

    A model passes it to attention "kvpack". Any other use raises InvalidParameter with advice.
    """

    def __init__(self, cache: Any, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.cache, self.number = cache, layer_index
        self._queries, self._dtype, self._dim = k.shape[2], k.dtype, v.shape[3]
        self._computed = (k, v) if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad) else ()

    def attend(self, q: torch.Tensor, **options: Any) -> torch.Tensor:
        """Call ``KvpackCache.attend`` for this layer. Compiled code does so through an operator."""
        out: torch.Tensor
        if torch.compiler.is_dynamo_compiling():
            out = self.cache.compiled.compiled_attend(self.number, q, self._dim, **options)
        elif self._computed:
            # The kernels compute no gradients. ``without_gradients`` makes a backward pass raise instead of losing them silently.
            with torch.no_grad():
                out = self.cache.attend(self.number, q.detach(), **options)
            out = without_gradients(out, q, *self._computed)
        else:
            out = self.cache.attend(self.number, q, **options)
        return out

    @eager_only("keys under a mask that is neither causal nor the model's window are decoded in eager code")
    def decode(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the dense keys and values for a call whose mask hides tokens."""
        k, v = self.cache.decode(self.number, self._queries, self._dtype)
        return without_gradients(k, *self._computed), without_gradients(v, *self._computed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __len__(self) -> NoReturn:
        self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        states = next((x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)), None)
        if states is not None:
            states._refuse()
        raise InvalidParameter(_REMEDY)

    def _refuse(self) -> NoReturn:
        if self.cache.is_unexpected_pass:
            with contextlib.suppress(OutOfBounds, InvalidParameter):
                self.cache.crop(-self._queries)
            raise InvalidParameter(
                "this model is not the one that the cache was created for, or the cache was released: continue with "
                "KvpackCache.of(cache.packed, model), which compares the models"
            )
        raise InvalidParameter(_REMEDY)


class _WithoutGradients(torch.autograd.Function):
    """An identity function whose ``backward`` raises InvalidParameter."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, *computed: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> NoReturn:
        raise InvalidParameter(
            "gradients cannot flow through a KvpackCache, whose keys and values are packed: train with use_cache=False or another cache, "
            "and run everything else under torch.no_grad()"
        )


def without_gradients(value: Any, *computed: torch.Tensor) -> Any:
    """Return ``value``, which depends on the tensors ``computed``.

    If ``backward`` would propagate gradients to these tensors, it raises InvalidParameter.
    """
    if value is None or not torch.is_grad_enabled() or not any(x.requires_grad for x in computed):
        return value
    return _WithoutGradients.apply(value, *computed)  # type: ignore[no-untyped-call]


_REMEDY = (
    'the model\'s attention reads keys and values as tensors, and these are packed: call model.set_attn_implementation("kvpack"), or, '
    "for a model whose attention cannot take packed layers, use KvpackCache.of(cache, model), or KvpackCache.of(cache, dense=True)"
)
