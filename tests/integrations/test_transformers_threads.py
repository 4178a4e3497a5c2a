"""One cache, chat or live cache in several threads, and several generations over one cache in one thread."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch

from kvpack.formats.errors import InvalidParameter
from kvpack.integrations.transformers import Chat, KvpackCache, model_changes
from support.chat_tokenizers import PLAIN, tokenizer
from support.small_models import small_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OPTIONS = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 12}
PROMPT = torch.arange(1, 21)[None]


class Streamer:
    """A streamer that calls a function after the prompt and after each token."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def put(self, value: torch.Tensor) -> None:
        self.call()

    def end(self) -> None:
        """Do nothing at the end of the text."""


@pytest.fixture
def model() -> Any:
    return small_llama()


@pytest.mark.parametrize(
    "use",
    [
        lambda model, cache: model.generate(PROMPT, past_key_values=cache, **OPTIONS),
        lambda model, cache: cache.generate(PROMPT, **OPTIONS),
        lambda model, cache: model(PROMPT, past_key_values=cache),
        lambda model, cache: cache.crop(0),
        lambda model, cache: cache.reset(),
        lambda model, cache: cache.batch_repeat_interleave(2),
    ],
    ids=["generate", "generate of the cache", "a pass", "crop", "reset", "batch_repeat_interleave"],
)
@pytest.mark.parametrize("calls", [0, 1, 2], ids=["before the prompt", "after the prompt", "after a token"])
def test_no_other_thread_changes_a_cache_while_one_generates(model: Any, use: Callable[[Any, Any], object], calls: int) -> None:
    expected = model.generate(PROMPT, **OPTIONS).tolist()
    count = iter(range(100))

    def refuse() -> None:
        if next(count) == calls:
            with ThreadPoolExecutor(1) as pool, pytest.raises(InvalidParameter, match="another thread is generating with this cache"):
                pool.submit(use, model, cache).result()
            assert len(cache.packed.layers) == len(model.model.layers)

    with KvpackCache(model, "raw") as cache:
        assert model.generate(PROMPT, past_key_values=cache, streamer=Streamer(refuse), **OPTIONS).tolist() == expected
        assert next(count) > calls
        # The cache is free again.
        cache.reset()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(use, model, cache).exception() is None


@pytest.mark.parametrize("attribute", ["_hooks", "_switch"])
def test_a_cache_stays_usable_while_another_thread_releases_the_previous_one(model: Any, attribute: str) -> None:
    previous = KvpackCache(model, "raw")
    released = weakref.ref(getattr(previous, attribute))
    with ThreadPoolExecutor(1) as pool, model_changes.CHANGES_LOCK:
        # The other thread waits for the lock to restore the model.
        pool.submit(setattr, previous, attribute, None)
        while released() is not None:
            time.sleep(0.001)
        cache = KvpackCache(model, "raw")
    previous.release()
    with cache:
        assert cache.generate(PROMPT, **OPTIONS).tolist() == model.generate(PROMPT, **OPTIONS).tolist()
        with pytest.raises(InvalidParameter, match="token 0 of row 0 has id 2"):
            model.generate(PROMPT.repeat(1, 2) + 1, past_key_values=cache, **OPTIONS)
    assert model.config._attn_implementation == "sdpa"
    assert not {"generate", "prepare_inputs_for_generation"} & vars(model).keys()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_model_and_its_wrapper_share_hooks(model: Any) -> None:
    wrapper = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    with KvpackCache(wrapper, "raw") as outer:
        with KvpackCache(model, "raw") as inner:
            expected = inner.generate(PROMPT, **OPTIONS).tolist()
        assert outer.generate(PROMPT, **OPTIONS).tolist() == expected
        assert not outer.packed.inputs.undetermined
        with pytest.raises(InvalidParameter, match="token 0 of row 0 has id 2"):
            wrapper.generate(input_ids=PROMPT.repeat(1, 2) + 1, past_key_values=outer, **OPTIONS)


def test_a_cache_is_free_after_generate_failed_in_a_thread(model: Any) -> None:
    def fail() -> None:
        raise RuntimeError("the stream has ended")

    with KvpackCache(model, "raw") as cache, ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match="the stream has ended"):
            pool.submit(model.generate, PROMPT, past_key_values=cache, streamer=Streamer(fail), **OPTIONS).result()
        assert model.generate(PROMPT, past_key_values=cache, **OPTIONS).tolist() == model.generate(PROMPT, **OPTIONS).tolist()


def test_an_interrupted_pass_of_generate_does_not_block_other_threads(model: Any) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with KvpackCache(model, "raw") as cache, ThreadPoolExecutor(1) as pool:
        handle = model.lm_head.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.generate(PROMPT, past_key_values=cache, **OPTIONS)
        handle.remove()
        assert pool.submit(lambda: cache.packed.tokens).result(60) == 20
        for failed in (cache, copy.deepcopy(cache)):
            with pytest.raises(InvalidParameter, match=r"a forward pass over the cache failed, .* drop them with crop\(-20\)"):
                model(PROMPT, past_key_values=failed)


def test_copies_of_an_interrupted_cache_remember_it(model: Any) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with KvpackCache(model, "raw") as cache, torch.no_grad():
        handle = model.lm_head.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(PROMPT, past_key_values=cache)
        handle.remove()
        with pytest.raises(InvalidParameter, match=r"a forward pass over the cache failed, .* drop them with crop\(-20\)"):
            model(PROMPT, past_key_values=copy.deepcopy(cache))


def test_copies_grow_independently(model: Any) -> None:
    with KvpackCache(model, "raw") as cache, torch.no_grad():
        expected = model(PROMPT).logits[:, -1]
        model(PROMPT[:, :-1], past_key_values=cache)
        copied = copy.copy(cache)
        model(PROMPT[:, :3], past_key_values=cache)
        torch.testing.assert_close(model(PROMPT[:, -1:], past_key_values=copied).logits[:, -1], expected)


def test_a_thread_that_ended_while_it_generated_does_not_block_others(model: Any) -> None:
    with KvpackCache(model, "raw") as cache:
        thread = threading.Thread(target=cache.passes.generating().__enter__)
        thread.start()
        thread.join()
        assert cache.generate(PROMPT, **OPTIONS).shape[1] == 32


@pytest.mark.parametrize(
    "change",
    [
        lambda model, cache, text: model(text[:, -1:], past_key_values=cache),
        lambda model, cache, text: model.generate(text, past_key_values=cache, **OPTIONS),
        lambda model, cache, text: cache.crop(-2),
        lambda model, cache, text: (cache.crop(-2), model(PROMPT[:, :2].expand(len(text), -1), past_key_values=cache)),
    ],
    ids=["a pass", "generate", "crop", "crop and refill"],
)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "beams", "prompt lookup"])
@pytest.mark.parametrize("calls", [0, 2], ids=["after the prompt", "after a token"])
def test_generate_refuses_a_cache_that_its_callbacks_changed(model: Any, change: Any, options: dict[str, Any], calls: int) -> None:
    count = iter(range(100))

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if next(count) == calls:
            change(model, cache, torch.cat([ids, ids[:, -1:]], 1))
        return scores

    with KvpackCache(model, "raw") as cache, pytest.raises(InvalidParameter, match="changed it between two steps"):
        model.generate(PROMPT, past_key_values=cache, logits_processor=[processor], **OPTIONS, **options)


def steps(model: Any, cache: Any, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """Generate as transformers does, one step at a time."""
    arguments: dict[str, Any] = {"past_key_values": cache, "attention_mask": torch.ones_like(ids), "use_cache": True}
    following, first = ids.shape[1] - cache.get_seq_length(), True
    while True:
        inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=following, is_first_iteration=first, **arguments)
        ids = torch.cat([ids, model(**inputs).logits[:, -1:].argmax(-1)], 1)
        arguments["attention_mask"], following, first = torch.ones_like(ids), 1, False
        yield ids


@pytest.mark.parametrize("shared", [False, True], ids=["two caches", "one cache"])
def test_interleaved_generations_need_a_cache_each(model: Any, shared: bool) -> None:
    longer = torch.cat([PROMPT, torch.tensor([[7, 8]])], 1)
    expected = [model.generate(text, **{**OPTIONS, "max_new_tokens": 2}).tolist() for text in (PROMPT, longer)]
    with torch.no_grad(), KvpackCache(model, "raw") as cache, KvpackCache(model, "raw") as other:
        first, second = steps(model, cache, PROMPT), steps(model, cache if shared else other, longer)
        next(first)
        next(second)
        if shared:
            with pytest.raises(InvalidParameter, match="generate continues a cache of 20 tokens, but the cache has 22"):
                next(first)
        else:
            assert [next(first).tolist(), next(second).tolist()] == expected


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 8}], ids=["one pass", "chunks"])
@pytest.mark.parametrize("tokens", [0, 9], ids=["empty cache", "cache with tokens"])
@pytest.mark.parametrize("given", ["all ids", "new ids and a mask of all tokens", "embeddings"])
def test_steps_continue_from_every_kind_of_prompt(model: Any, given: str, tokens: int, options: dict[str, Any]) -> None:
    expected = model.generate(PROMPT, **OPTIONS)[:, 20:].tolist()
    arguments = {
        "all ids": {"inputs": PROMPT},
        "new ids and a mask of all tokens": {"inputs": PROMPT[:, tokens:], "attention_mask": torch.ones_like(PROMPT)},
        "embeddings": {"inputs_embeds": model.get_input_embeddings()(PROMPT)},
    }[given]
    if given == "embeddings" and options:
        pytest.skip("transformers cannot split embeddings into chunks")
    with torch.no_grad(), KvpackCache(model, "raw") as cache:
        if tokens:
            model(PROMPT[:, :tokens], past_key_values=cache)
        found = model.generate(**arguments, past_key_values=cache, **OPTIONS, **options)
    assert found[:, -12:].tolist() == expected


def test_a_message_from_another_thread_waits_for_the_reply(model: Any, tmp_path: Path) -> None:
    """Files contain a reply or do not contain it, also those that another thread saves."""
    model, words, others = small_llama(vocab_size=264), tokenizer(PLAIN), []
    chat, alone = Chat(model, words, "raw"), Chat(model, words, "raw")
    options = {"do_sample": False, "max_new_tokens": 3}
    expected = [alone.send(text, **options) for text in ("One", "Two")]

    def ask() -> None:
        if not others:
            others.extend((pool.submit(chat.send, "Two", **options), pool.submit(chat.save, tmp_path / "chat.kvpack")))
            assert not any(other.done() for other in others)

    with ThreadPoolExecutor(2) as pool:
        found = chat.send("One", **options, streamer=Streamer(ask))
        assert [found, others[0].result()] == expected
        others[1].result()
    assert chat.messages == alone.messages
    assert Chat.load(tmp_path / "chat.kvpack", model, words).messages in (chat.messages[:2], chat.messages)


@pytest.mark.parametrize("use", [lambda chat: chat.send("Two"), lambda chat: chat.read("Two")], ids=["send", "read"])
def test_a_streamer_sends_no_message_before_the_reply_has_ended(use: Callable[[Any], object]) -> None:
    chat = Chat(small_llama(vocab_size=264), tokenizer(PLAIN), "raw")
    with pytest.raises(InvalidParameter, match="the chat is still computing its latest message"):
        chat.send("One", streamer=Streamer(lambda: use(chat)), max_new_tokens=3)
    assert chat.messages == []
    assert chat.read("One") > 0
