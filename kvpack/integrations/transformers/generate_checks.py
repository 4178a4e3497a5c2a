"""Checks that ``generate`` continues the tokens of its KvpackCache, and that only one thread generates into the cache."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from kvpack.formats.errors import InvalidParameter

from .cache_lock import CacheLock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .models import Model
    from .record import Record

_SHARED = (
    "KvpackCache.load(path, model, prompt=ids) keeps the tokens that a file and other ids share, kvpack.load(path).token_ids returns a "
    "file's ids, and Chat.load(path, model, tokenizer) resumes a chat with only the new message"
)


class GenerateChecks:
    """The checks of one cache. A pass, and every change of the cache, holds ``lock``.

    ``assisted`` is True if the next passes belong to assisted decoding, whose first pass receives all token ids.
    """

    def __init__(self, record: Record, model: Model | None) -> None:
        self.record, self._model = record, model
        self.lock, self._generating = CacheLock(), CacheLock()
        self.assisted = self._chunked = False
        self._left: tuple[int, int] | None = None
        """The tokens that a failed pass has added, if the caller has neither kept nor dropped them."""
        self._prompt_ids: int | None = None
        """Number of ids of ``generate`` until it has computed its prompt, otherwise None."""
        self._unmatched = 0
        """Number of tokens in the cache after the prompt, minus ``_prompt_ids``. Embeddings, for example, have no ids."""

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Return a context manager for a call of ``generate``. Until it ends, other threads can only read the cache."""
        with self.changing():
            hold = self._generating.acquire()
        try:
            yield
        finally:
            if hold:
                self._end_interrupted_pass()
                self._generating.release()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Return a context manager in which the cache may change. Raises InvalidParameter while another thread generates into it."""
        with self.lock.hold():
            self._check_thread()
            yield

    def _end_interrupted_pass(self) -> None:
        """If a pass of this thread did not report its end, as after a KeyboardInterrupt, record that it failed."""
        raise NotImplementedError

    def _acquire(self) -> None:
        """Acquire the lock for a pass. Raises InvalidParameter if another thread generates into the cache."""
        self.lock.acquire()
        try:
            self._check_thread()
        except InvalidParameter:
            self.lock.release()
            raise

    def _check_thread(self) -> None:
        if self._generating.is_taken:
            raise InvalidParameter(
                "another thread is generating with this cache: wait until it has finished, or give each thread a cache of its own, such as "
                "KvpackCache.of(cache.packed, model)"
            )

    def _count_prompt(self) -> None:
        """Note, after a pass, how many tokens the cache has in addition to the prompt's ids."""
        if self._prompt_ids is not None:
            self._unmatched = self.record.tokens - self._prompt_ids
            self._prompt_ids = self._prompt_ids if self._chunked else None

    def check_generate(self, model: torch.nn.Module, ids: torch.Tensor, arguments: dict[str, Any]) -> None:
        """Check the token ids passed to ``model.generate`` with a cache. Raises InvalidParameter unless they begin with the cache's ids.

        For the first pass of assisted decoding or of an encoder-decoder, this also sets how many of the ids must be computed, because
        transformers would compute all of them.
        """
        if arguments.get("use_cache") is False:
            raise InvalidParameter(
                "generate got a cache and use_cache=False, which computes all tokens again at every step: pass use_cache=True"
            )
        if self._chunked:
            return
        if not arguments.get("is_first_iteration", False):
            self._check_step(ids, arguments.get("next_sequence_length"))
            return
        self._prompt_ids = ids.shape[1]
        embeddings = arguments.get("inputs_embeds")
        if isinstance(embeddings, torch.Tensor):
            if self._model is not None and not self._model.has_encoder and self.record.tokens:
                self._check_embeddings(model, embeddings)
            return
        takes_all = self.assisted or (self._model is not None and self._model.has_encoder)
        self.assisted = False
        if takes_all and arguments.get("next_sequence_length") is None and self.record.tokens:
            arguments["next_sequence_length"] = ids.shape[1] - self.record.tokens
        following = arguments.get("next_sequence_length")
        if following is None:
            self._check_following(model, ids, arguments)
        else:
            self.check_ids(ids, following)

    def _check_step(self, ids: torch.Tensor, following: int | None) -> None:
        """Raise InvalidParameter if the cache has changed since the last step of this ``generate``.

        The step passes the last ``following`` of ``ids`` to the model.
        """
        if following is None:
            return
        known = ids[:, : ids.shape[1] - following]
        expected = known.shape[1] + self._unmatched
        found = "" if self.record.tokens == expected else f"the cache has {self.record.tokens}"
        if self.record.edited and not self._unmatched and not found:
            self.record.edited = False
            found = "" if self.record.first_mismatch(known) is None else "their ids have changed"
        if found:
            raise InvalidParameter(
                f"generate continues a cache of {expected} tokens, but {found}, because another pass or a call of crop changed it between "
                "two steps: give each generation its own cache, such as KvpackCache.of(cache.packed, model)"
            )

    @contextmanager
    def check_chunks(self, ids: torch.Tensor, arguments: dict[str, Any], columns: int) -> Iterator[None]:
        """Return a context manager for preparing a prompt in chunks. It first checks all token ids as ``check_generate`` does.

        ``columns`` is the width of the attention mask that ``generate`` creates if ``arguments`` has no mask. If the mask is as wide as
        ``ids``, these must begin with the cache's ids.
        """
        encoder = self._model is not None and self._model.has_encoder
        mask = arguments.get("decoder_attention_mask" if encoder else "attention_mask")
        self.assisted = False
        if self.record.tokens and ids.shape[1] == (columns if mask is None else mask.shape[1]):
            self.check_ids(ids, ids.shape[1] - self.record.tokens)
        self._prompt_ids, self._chunked = ids.shape[1], True
        try:
            yield
        finally:
            self._prompt_ids, self._chunked = None, False

    def check_ids(self, ids: torch.Tensor, following: int) -> None:
        """Raise InvalidParameter unless ``ids`` are the cache's ids followed by ``following`` more ids."""
        held = self.record.tokens
        self.check_first_ids(ids[:, : min(held, ids.shape[1])] if following <= 0 else ids[:, : ids.shape[1] - following])
        if following <= 0:
            instead = "To continue from exactly these, call crop(-1) on the cache first, or load it with prompt=ids"
            raise InvalidParameter(
                f"generate got {ids.shape[1]} token ids, but the cache holds {held}: pass those {held} ids followed by at least one "
                f"new one. {instead if ids.shape[1] == held else _SHARED}"
            )
        # The ids match, so the caller has taken the tokens of a failed pass into account.
        self._left = None

    def check_first_ids(self, ids: torch.Tensor) -> None:
        """Raise InvalidParameter unless ``ids``, ``[batch, token]``, are the cache's first ids."""
        differing = self.record.first_mismatch(ids)
        if differing is not None:
            token, row, expected, actual = differing
            raise InvalidParameter(
                f"token {token} of row {row} has id {actual}, but the cache was computed from id {expected}: pass the "
                f"{self.record.tokens} ids of the cache followed by new ones. {_SHARED}"
            )

    def _check_embeddings(self, model: Any, embeddings: torch.Tensor) -> None:
        """Raise InvalidParameter unless ``embeddings``, ``[batch, token, dim]``, begin with the embeddings of the cache's ids.

        This is checked only if the ids determine all embeddings. ``generate`` drops the embeddings of the cache's tokens.
        """
        tokens, inputs = self.record.tokens, self.record.inputs
        if embeddings.shape[1] <= tokens:
            raise InvalidParameter(
                f"generate got {embeddings.shape[1]} embeddings, but the cache holds {tokens} tokens: pass the embeddings of those "
                "tokens followed by at least one new one"
            )
        if inputs is None or inputs.undetermined or inputs.tokens != tokens:
            return
        ids = self.record.ids.to(embeddings.device)
        expected = model.get_input_embeddings()(ids).to(embeddings.dtype)
        differing = (expected != embeddings[:, :tokens]).any(-1).any(0).nonzero()
        if len(differing):
            token = int(differing[0])
            raise InvalidParameter(
                f"the embedding of token {token} differs from the embedding of id {int(ids[0, token])}, which the cache was computed "
                "from: pass the embeddings of the cache's tokens first"
            )

    def _check_following(self, model: torch.nn.Module, ids: torch.Tensor, arguments: dict[str, Any]) -> None:
        """Raise InvalidParameter if ``generate`` cannot skip the cache's tokens, even if ``ids`` begin with them.

        ``generate`` recognizes complete ids by the length of an attention mask, but creates no mask if the model's forward has no parameter
        for it.
        """
        tokens = self.record.tokens
        if not 0 < tokens < ids.shape[1] or arguments.get("attention_mask") is not None:
            return
        if "attention_mask" in inspect.signature(model.forward).parameters or self.record.first_mismatch(ids[:, :tokens]) is not None:
            return
        raise InvalidParameter(
            f"{type(model).__name__}.forward has no parameter attention_mask, so generate cannot skip the cache's {tokens} tokens if the "
            f"{ids.shape[1]} token ids begin with them: if forward was replaced, keep its signature with functools.wraps"
        )
