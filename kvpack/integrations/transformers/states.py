"""The objects that a KvpackCache gives to a model in place of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kvpack.live.cache import LiveCache


class PackedLength(int):
    """The number of keys for a mask when the keys are packed: kvpack attention then needs no mask.

    ``first_visible`` tells the first token that a layer with this mask attends to: layers may hold more than the one that was asked.
    """

    first_visible: Callable[[], int] = staticmethod(lambda: 0)


class PackedStates:
    """Layer ``number`` of a live cache as attention "kvpack" takes it, which calls ``check_attention`` with its module.

    ``decoded`` gives the tensors, dense, for a call whose mask hides tokens. Anything else that touches it raises InvalidParameter,
    which says what to do.
    """

    def __init__(
        self,
        check_attention: Callable[[Any], None],
        live: LiveCache,
        number: int,
        decoded: Callable[[], tuple[torch.Tensor | None, torch.Tensor | None]],
    ) -> None:
        self.check_attention, self.live, self.number, self.decoded = check_attention, live, number, decoded

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
        raise InvalidParameter(_REMEDY)

    def _refuse(self) -> NoReturn:
        raise InvalidParameter(_REMEDY)


_REMEDY = (
    'the model\'s attention reads keys and values as tensors, and these are packed: call model.set_attn_implementation("kvpack"), or, '
    "for a model whose attention cannot take packed layers, write KvpackCache(cache, model), or KvpackCache(cache, dense=True)"
)
