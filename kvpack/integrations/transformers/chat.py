"""Chat: a conversation with a model over one packed cache. Callers pass only new messages, and the model computes only new tokens."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Self

import torch

from kvpack.cache.conversion import pack_tails
from kvpack.cache.files import load, save
from kvpack.coding.recipes import Recipe, parse_recipe, preset_name
from kvpack.file.atomic import file_version, keep_version
from kvpack.file.limits import MAX_STRING_BYTES
from kvpack.file.metadata import CHAT, CHAT_MESSAGES, Value, to_bytes
from kvpack.file.user_files import path_text
from kvpack.formats.arguments import describe
from kvpack.formats.errors import InvalidParameter, InvalidType, KvpackWarning, LimitExceeded
from kvpack.identity import modules
from kvpack.store.store import Store

from .arguments import check_flags, check_model_of_file
from .cache import check_model, create_cache, inspect_model
from .cache_lock import CacheLock
from .hooks import models_in
from .models import execution_device
from .prefill import DEFAULT_STEP, compute_missing

if TYPE_CHECKING:
    import os

    from kvpack.cache.cache import Cache
    from kvpack.cache.files import Bases

RECIPE = "kvpack-4"
"""Default recipe of a chat."""
MAX_REPLY_TOKENS = 512

_MIN_SHARED = 0.1
"""Minimum fraction of a loaded chat's tokens that must equal the beginning of the conversation.

A template that drops reasoning keeps more of them, and another template keeps only a few.
"""

_DIGEST = f"{CHAT}sha256"
"""Metadata name of the digest of the messages as JSON."""
_SPANS = "of_token_ids"

Message = dict[str, Any]


class Chat:
    """A conversation with a transformers ``model`` whose KV cache stays packed from one message to the next.

    Pass only the new message to ``send``. The whole conversation is rendered with the chat template each time, and the model computes only
    the tokens after the common prefix with the cache. A template may therefore drop or change earlier text, such as reasoning. Tokens from
    the first change on are computed again. Without a chat template, the texts of all messages are joined. If threads share a chat, each
    message waits for the reply to the one before.

    ``messages`` are the messages so far, dicts with a role and a content as for ``apply_chat_template``, and ``template`` contains the
    other arguments of that method. With ``store``, a ``kvpack.Store`` of the model, the first call loads the longest stored prefix of the
    conversation, and every reply is saved there. ``recipe`` defaults to the store's, or kvpack-4. ``dense`` is as for KvpackCache. Raises
    InvalidParameter, for example if ``recipe`` is not the store's, and InvalidType if ``store`` is not a ``kvpack.Store`` or ``messages``
    is not a list of message dicts.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        recipe: str | os.PathLike[str] | Recipe | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] = (),
        store: Store | None = None,
        template: Mapping[str, Any] | None = None,
        dense: bool | None = None,
    ) -> None:
        check_flags(dense=dense, keep_all=False)
        if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
            raise InvalidType(f"tokenizer is {describe(tokenizer)}, expected what AutoTokenizer.from_pretrained(folder) returns")
        modules.check_model(model)
        if template is not None and not isinstance(template, Mapping):
            raise InvalidType(f"template is {describe(template)}, expected a dict of arguments for apply_chat_template")
        # First, so that pickle refuses a chat before it reaches the model, whose hooks may not be picklable.
        self._turn = CacheLock()
        self.model, self.tokenizer = model, tokenizer
        self.messages: list[Message] = [_check_message(message) for message in messages]
        if store is not None and not isinstance(store, Store):
            raise InvalidType(
                f"store is {describe(store)}, expected a kvpack.Store, such as kvpack.Store('chats', kvpack.Identity.of(model, 'kvpack-4'))"
            )
        self._store, self._template, self._dense = store, dict(template or {}), dense
        if store is not None and recipe is None:
            basis = store.basis()
            recipe = Recipe(store.identity.recipe, basis)
        self._recipe = parse_recipe(RECIPE if recipe is None else recipe)
        if store is not None and self._recipe.canonical != store.identity.recipe:
            own, other = (preset_name(text) or text for text in (self._recipe.canonical, store.identity.recipe))
            raise InvalidParameter(
                f"recipe is {own!r}, but the store keeps caches in {other!r}: omit recipe, or open a store with "
                "kvpack.Identity.of(model, recipe)"
            )
        self._cache: Cache | None = None
        self._is_loaded = False
        self._version: tuple[str, int, int] | None = None
        """The version of the file that was loaded or saved last."""
        self._reused = self._prompt_tokens = 0

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: torch.nn.Module,
        tokenizer: Any,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        recipe: str | os.PathLike[str] | Recipe | None = None,
        basis: Bases | None = None,
        dense: bool | None = None,
    ) -> Self:
        """Load the chat in the file at ``path``, which the same ``model`` can continue in this or any other process.

        ``recipe`` is the recipe to continue in. A file in another recipe is converted, but precision that it has lost does not return.
        ``messages`` replaces those in the file, and ``dense`` is as for KvpackCache. Raises InvalidParameter if the file contains no
        messages, if they cannot be read with this tokenizer, or if another model computed the file, and the same errors as ``kvpack.load``.
        Issues a KvpackWarning at the next message if this tokenizer's chat template renders the conversation differently, so that it is
        computed again.
        """
        check_model_of_file(path, model)
        version = file_version(path_text(path))
        cache = load(path, device=execution_device(model), recipe=recipe, basis=basis)
        model_properties, _ = inspect_model(model)
        if model_properties is not None:
            check_model(cache, model, model_properties)
        history = messages_in(cache, tokenizer) if messages is None else messages
        if history is None:
            raise InvalidParameter(
                f"{path} contains no chat messages: pass the messages that the cache was computed from as "
                "messages=, or continue its token ids with KvpackCache.load(path, model)"
            )
        chat = cls(model, tokenizer, messages=history, template=template, dense=dense)
        chat._cache, chat._is_loaded, chat._version = cache, True, version
        return chat

    @property
    def cache(self) -> Cache:
        """The packed cache of the conversation so far. Raises InvalidParameter before the first message."""
        if self._cache is None:
            raise InvalidParameter("the chat has no cache yet: send a message first")
        return self._cache

    @property
    def reused(self) -> int:
        """Number of prompt tokens in the latest turn that came from the cache. All others were computed."""
        return self._reused

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the latest reply."""
        return self._prompt_tokens

    def send(self, message: str | Mapping[str, Any] | Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the model's reply to ``message``: user text, a message with another role, or several messages.

        If the conversation ends with a user message, text is appended to it. ``options``, such as max_new_tokens (512 by default),
        do_sample or streamer, are passed to the model's ``generate``. On errors, the conversation is unchanged. Raises InvalidType if
        ``message`` is none of these, InvalidParameter if the tokenizer rejects the messages, and the same errors as KvpackCache.generate.
        """
        config = options.get("generation_config")
        if not any(name in options or getattr(config, name, None) for name in ("max_new_tokens", "max_length")):
            options["max_new_tokens"] = MAX_REPLY_TOKENS
        if "stop_strings" in options:
            options.setdefault("tokenizer", self.tokenizer)
        with self._next_turn():
            messages = self._with_message(message)
            _, ids = self._render(messages, reply=True)
            written = self._generate(ids, options)
            reply: str = self.tokenizer.decode(written, skip_special_tokens=True)
            self.messages = [*messages, {"role": "assistant", "content": reply}]
        return reply

    def read(self, message: str | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> int:
        """Compute the keys and values of ``message`` without a reply, and return the number of tokens in the conversation.

        The next user text is appended to this message.
        """
        with self._next_turn():
            messages = self._with_message(message)
            _, ids = self._render(messages, reply=False)
            # The token that generate returns has no keys and values yet.
            self._generate(ids, {"max_new_tokens": 1, "do_sample": False})
            self.messages = messages
        return len(ids)

    def save(self, path: str | os.PathLike[str], *, messages: bool = True, compact: bool = False, **options: Any) -> int:
        """Save the packed cache with the messages as a kvpack file, and return its size in bytes.

        ``options`` are passed to ``kvpack.save``. A growing cache keeps the keys of up to 127 newest tokens raw, so a short chat takes more
        bits than its recipe's name implies. ``compact=True`` packs those keys in the file too, and compresses tensors with zstd. Texts that
        are in the file's token ids are not stored again. ``messages=False`` omits all messages, which can then be passed to ``Chat.load``
        as ``messages``. Raises LimitExceeded if the remaining texts are too long, WriteFailed if the file has changed since this chat
        loaded or saved it, and the same errors as ``kvpack.save``.
        """
        with self._turn.hold():
            cache = self.cache
            given = options.pop("metadata", None) or cache.metadata
            metadata = {name: value for name, value in given.items() if not name.startswith(CHAT)}
            if messages:
                metadata |= self._metadata(cache)
        if compact:
            cache = replace(cache, layers=pack_tails(cache.layers, cache.start))
            options.setdefault("compress", True)
        with keep_version(path_text(path), self._version):
            size = save(cache, path, metadata=metadata, **options)
        self._version = file_version(path_text(path))
        return size

    @contextmanager
    def _next_turn(self) -> Iterator[None]:
        """Return a context manager for one turn. It waits for the turns of other threads, and raises InvalidParameter within a turn."""
        if not self._turn.acquire():
            raise InvalidParameter("the chat is still computing its latest message: wait until send or read has returned")
        try:
            yield
        finally:
            self._turn.release()

    def _with_message(self, message: Any) -> list[Message]:
        """Return the messages of the conversation, followed by the new ones in ``message``."""
        if isinstance(message, str):
            last = self.messages[-1] if self.messages else {}
            if last.get("role") == "user" and isinstance(last.get("content"), str):
                between = "\n\n" if self._has_template else ""
                return [*self.messages[:-1], {**last, "content": f"{last['content']}{between}{message}"}]
            return [*self.messages, {"role": "user", "content": message}]
        return [*self.messages, *map(_check_message, message if isinstance(message, list | tuple) else [message])]

    @property
    def _has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def _render(self, messages: list[Message], *, reply: bool) -> tuple[str, list[int]]:
        """Return the rendered conversation as text and as token ids. With ``reply``, it ends where the model's reply begins."""
        from jinja2 import TemplateError

        try:
            if not self._has_template:
                text = "".join(message["content"] for message in messages)
                return text, list(self.tokenizer(text)["input_ids"])
            is_open = not reply and messages[-1]["role"] == "user"
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=reply, continue_final_message=is_open, **self._template
            )
            return text, list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        except (TemplateError, LookupError, ValueError, TypeError) as error:
            raise InvalidParameter(f"the tokenizer or its chat template rejects these messages: {error}") from error

    def _generate(self, ids: list[int], options: dict[str, Any]) -> list[int]:
        """Return the tokens that the model generates after ``ids``. The cache then contains all but the last of these tokens."""
        if not ids:
            raise InvalidParameter("the conversation has no tokens: send a message that is not empty")
        if any(model.training for model in models_in(self.model)):
            raise InvalidParameter("the model is in training mode, so its next turn could not reuse this one: call model.eval() first")
        cache = self._cache
        if cache is None and self._store is not None:
            _, cache = self._store.load(ids[:-1], device=execution_device(self.model))
        # A store needs all tokens, including those that sliding windows would drop.
        kept = self._store is not None
        with create_cache(self.model, self._recipe if cache is None else cache, prompt=ids, keep_all=kept, dense=self._dense) as past:
            self._reused, self._prompt_tokens = past.get_seq_length(), len(ids)
            if self._is_loaded and cache is not None:
                _warn_about_other_template(cache, ids)
            self._is_loaded = False
            chunk = 1 if self._store is None else self._store.chunk
            if self._store is not None and past.keeps_states and self._reused < len(ids) - 1:
                # The store can resume a prompt only where a forward pass ended.
                prompt = torch.tensor([ids[:-1]], dtype=torch.int64, device=execution_device(self.model))
                compute_missing(past, self.model, prompt, max(DEFAULT_STEP // chunk, 1) * chunk, chunk)
            out = past.generate([ids], **{**options, "return_dict_in_generate": False})
            packed = past.packed
            # A prompt shorter than a chunk has no states at the end of a chunk.
            storable = not past.keeps_states or any(not tokens % chunk for tokens in (*past.states_at, packed.tokens))
        if len(out) != 1 or len(packed.token_ids) != 1:
            raise InvalidParameter(
                f"generate returned {len(out)} sequences for {len(packed.token_ids)} in the cache, but a chat has one: omit "
                "num_beams and num_return_sequences"
            )
        self._cache, written = packed, out[0].tolist()
        if self._store is not None and storable:
            self._store.save(written[:-1], packed)
        return list(written[len(ids) :])

    def _metadata(self, cache: Cache) -> dict[str, Value]:
        """Return the metadata of a file, including the messages. Text that occurs in the token ids is stored as a range of ids."""
        text, _ = self._render(self.messages, reply=False)
        tokens = _TokenRanges(self.tokenizer, text, cache.token_ids[0].tolist(), special=not self._has_template)
        try:
            digest = _messages_digest(self.messages)
            stored = json.dumps([_store_message(message, tokens) for message in self.messages], ensure_ascii=False)
            parts = _split_text(stored, MAX_STRING_BYTES)
        except (TypeError, ValueError) as error:
            raise InvalidParameter(
                f"the messages cannot be stored as JSON ({error}): omit them with save(path, messages=False)"
            ) from None
        result: dict[str, Value] = {CHAT_MESSAGES: len(self.messages), _DIGEST: digest}
        result |= {f"{CHAT}{number:03}": part for number, part in enumerate(parts)}
        try:
            to_bytes(result)
        except LimitExceeded:
            raise LimitExceeded(
                f"the chat's text outside its token ids takes {len(stored.encode()):,} bytes, more than a file can hold: keep "
                "the messages elsewhere, call save(path, messages=False), and pass them to Chat.load(path, model, tokenizer, messages=...)"
            ) from None
        return result


def _warn_about_other_template(cache: Cache, ids: list[int]) -> None:
    """Issue a KvpackWarning if ``cache`` and ``ids`` have so few tokens in common that different templates must have rendered them.

    ``reused`` cannot show this. It may also be 0 because a cache with states or sliding windows cannot return to every position.
    """
    stored = cache.token_ids[0].tolist()
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(stored, ids, strict=False)))
    if shared < min(len(stored), len(ids)) * _MIN_SHARED:
        warnings.warn(
            f"only {shared:,} of the file's {len(stored):,} tokens begin this conversation, so it is computed again: load the chat with "
            "the tokenizer, chat template and template= that it was saved with",
            KvpackWarning,
            stacklevel=4,
        )


def messages_in(cache: Cache, tokenizer: Any) -> list[Message] | None:
    """Return the messages that ``Chat.save`` stored in a file, or None if there are none.

    Raises InvalidParameter if ``tokenizer`` decodes the file's token ids to other texts.
    """
    metadata = cache.metadata
    if CHAT_MESSAGES not in metadata:
        return None
    names = sorted(name for name in metadata if name.startswith(CHAT) and name not in (CHAT_MESSAGES, _DIGEST))
    ids = cache.token_ids[0].tolist()
    try:
        messages = [_restore_message(message, ids, tokenizer) for message in json.loads("".join(str(metadata[name]) for name in names))]
    except (ValueError, TypeError, LookupError, AttributeError):
        messages = []
    if _messages_digest(messages) != metadata.get(_DIGEST):
        raise InvalidParameter(
            "the messages of the chat cannot be read from the file: load all of its tokens with the tokenizer that it was saved with, or "
            "pass the messages that the cache was computed from as messages="
        )
    return messages


class _TokenRanges:
    """Maps characters of a rendered conversation to positions in the cache's token ids, up to the first token that differs."""

    def __init__(self, tokenizer: Any, text: str, cached_ids: list[int], *, special: bool) -> None:
        self.tokenizer, self.text, self.ids, self.at = tokenizer, text, cached_ids, 0
        self._starts: list[int] = []
        self._ends: list[int] = []
        if getattr(tokenizer, "is_fast", False):
            encoding = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
            for token, expected, (start, end) in zip(encoding["input_ids"], cached_ids, encoding["offset_mapping"], strict=False):
                if token != expected:
                    break
                self._starts.append(start)
                self._ends.append(end)

    def parts(self, content: str) -> list[Any]:
        """Return ``content`` as a list of texts and of ranges ``[start, stop]`` of token ids. Calls must follow the order of the
        conversation.
        """
        kept = _longest_suffix_length(content, self.text, self.at)
        begin = self.text.find(content[len(content) - kept :], self.at) if kept else -1
        if begin < 0:
            return [content]
        self.at = begin + kept
        count = range(len(self._starts))
        first = next((n for n in count if self._starts[n] >= begin and self._ends[n] > self._starts[n]), None)
        last = next((n for n in reversed(count) if self._ends[n] <= self.at), None)
        if first is None or last is None or last < first:
            return [content]
        middle = _decode_ids(self.tokenizer, self.ids[first : last + 1])
        offset = content.find(middle, max(0, len(content) - kept)) if middle else -1
        return [content] if offset < 0 else [*filter(None, (content[:offset], [first, last + 1], content[offset + len(middle) :]))]


def _longest_suffix_length(content: str, text: str, start: int) -> int:
    """Return the length of the longest suffix of ``content`` that occurs in ``text`` at or after ``start``.

    Templates may drop the beginning of a message, such as reasoning, so that only a suffix occurs.
    """
    low, high = 0, len(content)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text.find(content[len(content) - middle :], start) >= 0 else (low, middle - 1)
    return low


def _store_message(message: Message, tokens: _TokenRanges) -> Message:
    content = message.get("content")
    return {**message, "content": {_SPANS: tokens.parts(content)}} if isinstance(content, str) and content else message


def _restore_message(message: Message, ids: list[int], tokenizer: Any) -> Message:
    content = message.get("content")
    if not isinstance(content, dict) or content.keys() != {_SPANS}:
        return message
    parts = (part if isinstance(part, str) else _decode_ids(tokenizer, ids[slice(*part)]) for part in content[_SPANS])
    return {**message, "content": "".join(parts)}


def _decode_ids(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _messages_digest(messages: list[Message]) -> str:
    return hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()


def _split_text(text: str, size: int) -> list[str]:
    """Split ``text`` into parts of at most ``size`` bytes of UTF-8."""
    parts, data = [], text.encode()
    while data:
        part = data[:size].decode(errors="ignore")
        parts.append(part)
        data = data[len(part.encode()) :]
    return parts


def _check_message(message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidType(f"a message is {describe(message)}, expected a dict such as {{'role': 'user', 'content': 'Hello'}}")
    return dict(message)
