"""Tests of a chat over one packed cache: callers pass only new messages, and chat templates may change earlier text."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import kvpack
from kvpack.bench import real_model
from kvpack.errors import InvalidParameter, InvalidType, KvpackWarning, LimitExceeded, WriteFailed
from kvpack.integrations.transformers import Chat
from kvpack.models import ByteTokenizer, load_model
from support.chat_tokenizers import ALTERNATING, PLAIN, REASONING, tokenizer
from support.zoo_models import model_of

NOT_TEXT = [token for token in range(264) if not (letter := tokenizer().decode([token])) or not letter.isascii() or len(letter) > 1]
"""Tokens that are not letters. Text that contains one of them does not tokenize to the same tokens again."""
GREEDY = {"do_sample": False, "max_new_tokens": 12, "suppress_tokens": NOT_TEXT}
HELLO, MORE = "Good morning. My name is Ada.", "What is my name? ☕ 名前"


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model()


def said(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Return the model's reply without kvpack, computed from the first token."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize(("template", "dense"), [(PLAIN, None), (REASONING, True)])
def test_replies_equal_those_of_the_complete_conversation(model: Any, template: str, dense: bool | None, tmp_path: Path) -> None:
    words, messages = tokenizer(template), []
    chat = Chat(model, words, "raw", dense=dense)
    # Only decoded layers return attention weights.
    options = GREEDY | {"output_attentions": bool(dense)}
    for turn, text in enumerate((HELLO, MORE, "And?")):
        messages.append({"role": "user", "content": text})
        expected = said(model, words, messages)
        held = chat.cache.tokens if turn else 0
        assert chat.send(text, **options) == expected
        # The last token of a reply is not in the cache yet.
        assert chat.reused == held < chat.prompt_tokens
        messages.append({"role": "assistant", "content": expected})
        assert chat.messages == messages
        chat.save(tmp_path / "chat.kvpack")
        chat = Chat.load(tmp_path / "chat.kvpack", model, words, dense=dense)
        assert chat.messages == messages
    assert model.config._attn_implementation == "sdpa"


def test_a_compact_file_packs_the_newest_keys_and_continues(model: Any, tmp_path: Path) -> None:
    words = tokenizer(PLAIN)
    chat = Chat(model, words, "kvpack-3")
    chat.send(HELLO, **GREEDY)
    sizes = [chat.save(tmp_path / "chat.kvpack", compact=compact) for compact in (False, True)]
    assert sizes[1] < sizes[0]
    assert chat.cache[0].k.tail.shape[2] > 0, "the chat in memory packed its newest keys"
    loaded = Chat.load(tmp_path / "chat.kvpack", model, words)
    assert [layer.k.tail.shape[2] for layer in loaded.cache] == [0] * len(loaded.cache)
    assert loaded.cache.recipe == chat.cache.recipe
    loaded.send(MORE, **GREEDY)
    assert loaded.reused == chat.cache.tokens
    for _ in range(2):
        loaded.save(tmp_path / "chat.kvpack")
    (tmp_path / "link").symlink_to("chat.kvpack")
    with pytest.raises(WriteFailed, match=r"link: not saved, because another process or chat has changed the file.*send the message again"):
        chat.save(tmp_path / "link")
    assert Chat.load(tmp_path / "chat.kvpack", model, words).messages == loaded.messages
    chat.save(tmp_path / "other.kvpack")


def test_tokens_that_a_template_drops_are_recomputed(model: Any, tmp_path: Path) -> None:
    words = tokenizer(REASONING)
    messages = [{"role": "user", "content": HELLO}, {"role": "assistant", "content": "<think>Say hello.</think>\nHello, Ada."}]
    chat = Chat(model, words, "raw")
    chat.read(messages)
    chat.save(tmp_path / "chat.kvpack")
    chat = Chat.load(tmp_path / "chat.kvpack", model, words)
    assert chat.messages == messages
    expected = said(model, words, [*messages, {"role": "user", "content": MORE}])
    assert chat.send(MORE, **GREEDY) == expected
    kept = f"<|im_start|>user\n{HELLO}<|im_end|>\n<|im_start|>assistant\n"
    assert chat.reused == len(words(kept)["input_ids"])
    # The reasoning is no more in the token ids, and the message is whole.
    chat.save(tmp_path / "chat.kvpack")
    assert "<think>" not in words.decode(chat.cache.token_ids[0])
    assert Chat.load(tmp_path / "chat.kvpack", model, words).messages == chat.messages
    assert chat.messages[1] == messages[1]


@pytest.mark.scenario
def test_texts_that_token_ids_contain_are_not_stored_again(model: Any, tmp_path: Path) -> None:
    text = "A long document. " * 300
    chat = Chat(model, tokenizer(), "octopus-4")
    assert chat.read({"role": "user", "content": text}) == chat.cache.tokens
    chat.save(tmp_path / "chat.kvpack", metadata={"title": "one"})
    metadata = kvpack.load(tmp_path / "chat.kvpack").metadata
    assert metadata["title"] == "one"
    assert sum(len(str(value)) for value in metadata.values()) < 200
    loaded = Chat.load(tmp_path / "chat.kvpack", model, tokenizer())
    loaded.send("What is this?", **GREEDY)
    assert loaded.reused == chat.cache.tokens
    assert loaded.messages[0] == {"role": "user", "content": f"{text}\n\nWhat is this?"}
    loaded.save(tmp_path / "chat.kvpack")
    assert kvpack.load(tmp_path / "chat.kvpack").metadata["title"] == "one"


def test_a_store_provides_the_beginning_of_a_conversation(model: Any, tmp_path: Path) -> None:
    words, identity = tokenizer(), kvpack.Identity.of(model, "raw")
    with kvpack.Store(tmp_path / "store", identity, chunk=32) as store:
        first = Chat(model, words, store=store)
        first.send(HELLO, **GREEDY)
        assert first.reused == 0
        held = first.cache.tokens
        # Another process has the messages, and no cache.
        second = Chat(model, words, store=store, messages=first.messages)
        expected = said(model, words, [*first.messages, {"role": "user", "content": MORE}])
        assert second.send(MORE, **GREEDY) == expected
        assert second.reused == held // 32 * 32 > 0
        assert store.match(second.cache.token_ids) == second.cache.tokens // 32 * 32
        # A conversation that the store does not know is computed.
        other = Chat(model, words, store=store, messages=[{"role": "system", "content": "x" * 40}])
        other.send(HELLO, **GREEDY)
        assert other.reused == 0
    with pytest.raises(InvalidParameter, match="the chat has no cache yet"):
        _ = Chat(model, words, store=store).cache


def test_an_unsuitable_store_is_refused_at_once(model: Any, tmp_path: Path) -> None:
    words = tokenizer()
    with pytest.raises(InvalidType, match=r"store is 'chats', expected a kvpack\.Store, such as kvpack\.Store\('chats', "):
        Chat(model, words, store="chats")  # type: ignore[arg-type]
    with kvpack.Store(tmp_path / "store", kvpack.Identity.of(model, "kvpack-4"), chunk=128) as store:
        assert Chat(model, words, "kvpack-4", store=store).messages == []
        with pytest.raises(InvalidParameter, match=r"'kvpack-3', but the store .* 'kvpack-4': omit .*Identity\.of\(model, recipe\)"):
            Chat(model, words, "kvpack-3", store=store)


def test_options_of_generate_end_replies_and_leave_the_chat_reusable(model: Any) -> None:
    words = tokenizer()
    chat = Chat(model, words, "raw")
    config = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, suppress_tokens=NOT_TEXT)
    assert len(chat.send(HELLO, generation_config=config, return_dict_in_generate=True)) == 3
    # generate passes the tokenizer on to every forward pass.
    third_letter = said(model, words, [*chat.messages, {"role": "user", "content": MORE}])[2]
    assert len(chat.send(MORE, stop_strings=[third_letter], **GREEDY)) <= 3
    held = chat.cache.tokens
    chat.send("And?", **GREEDY)
    assert chat.reused == held


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda model, words: Chat(model, None), "tokenizer is None"),
        (lambda model, words: Chat(words, model), "tokenizer is a .*ForCausalLM"),
        (lambda model, words: Chat("folder", words), "model is 'folder', expected a transformers model: load the model first"),
        (lambda model, words: Chat(model, words, template=5), "template is 5, expected a dict"),
        (lambda model, words: Chat.load("chat.kvpack", words, model), "model is a .*, expected a transformers model"),
        (lambda model, words: Chat(model, words).send(None), "a message is None, expected a dict"),
        (lambda model, words: Chat(model, words).send([5]), "a message is 5, expected a dict"),
        (lambda model, words: Chat(torch.nn.Linear(2, 2), words).send("Hi"), "model is a Linear, expected a transformers model"),
        (lambda model, words: Chat(model.model, words).send("Hi"), "Model has no method generate: load .* AutoModelForCausalLM"),
        (lambda model, words: Chat(model, words).send(b"Hi"), "a message is 2 bytes, expected a dict"),
        (lambda model, words: pickle.dumps(Chat(model, words)), r"a Chat cannot be pickled: write it with chat\.save"),
        (lambda model, words: Chat(model, words).send("\ud800"), "the tokenizer or its chat template rejects these messages"),
    ],
)
def test_foreign_arguments_are_refused(model: Any, action: Any, message: str) -> None:
    with pytest.raises((InvalidType, InvalidParameter), match=message):
        action(model, tokenizer())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 5}, r"generate rejects these options: .*'max_tokens'.* The option for the length of a reply is max_new_tokens"),
        ({"max_new_tokens": 0}, "generate rejects these options: `max_new_tokens` must be greater than 0"),
        ({"max_new_tokens": "5"}, "generate rejects these options: .* not supported between instances of 'str' and 'int'"),
        ({"past_key_values": None}, "generate rejects these options: .* multiple values for keyword argument 'past_key_values'"),
        ({"temperature": -1.0, "do_sample": True}, "generate rejects these options: `temperature`"),
    ],
)
def test_options_that_generate_rejects_leave_the_chat_unchanged(model: Any, options: dict[str, Any], message: str) -> None:
    chat = Chat(model, tokenizer(), "raw")
    chat.send(HELLO, **GREEDY)
    messages, held = chat.messages, chat.cache.tokens
    with pytest.raises(InvalidParameter, match=message):
        chat.send(MORE, **options)
    assert (chat.messages, chat.cache.tokens) == (messages, held)


def test_errors_after_the_first_pass_are_those_of_the_caller(model: Any) -> None:
    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such word")

    with pytest.raises(ValueError, match=r"^no such word$"):
        Chat(model, tokenizer(), "raw").send(HELLO, logits_processor=[fail], **GREEDY)


def test_a_loaded_chat_continues_in_the_given_recipe(model: Any, tmp_path: Path) -> None:
    words, path = tokenizer(), tmp_path / "chat.kvpack"
    chat = Chat(model, words, "kivi-4")
    chat.read(HELLO * 9)
    chat.save(path)
    other = Chat.load(path, model, words, recipe="kivi-2")
    assert (other.cache.recipe, other.messages) == (kvpack.Recipe("kivi-2").canonical, chat.messages)
    other.send(MORE, **GREEDY)
    assert other.reused > 0
    # In its own recipe, a file keeps its raw tail.
    same = Chat.load(path, model, words, recipe="kivi-4").cache
    assert same[0].k.tail.shape == chat.cache[0].k.tail.shape != other.cache[0].k.tail.shape


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "Hi"}]])
def test_only_texts_are_joined_without_a_template(model: Any, content: Any) -> None:
    words = tokenizer()
    words.chat_template = None
    with pytest.raises(InvalidParameter, match=r"rejects these messages: .* expected str instance"):
        Chat(model, words, "raw").send({"role": "user", "content": content}, **GREEDY)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_model_in_training_mode_is_refused_with_advice(model: Any) -> None:
    chat = Chat(copy.deepcopy(model).train(), tokenizer(), "raw")
    with pytest.raises(InvalidParameter, match=r"the model is in training mode, .* call model\.eval\(\)"):
        chat.send(HELLO, **GREEDY)
    chat.model.eval()
    assert chat.send(HELLO, **GREEDY)
    # A new wrapper is in training mode, but its modules are not.
    wrapper = peft.get_peft_model(chat.model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert Chat(wrapper, tokenizer(), "raw").send(HELLO, **GREEDY)


def test_loading_refuses_the_cache_of_another_model(model: Any, tmp_path: Path) -> None:
    words = tokenizer()
    chat = Chat(model, words, "raw")
    chat.read(HELLO)
    chat.save(tmp_path / "chat.kvpack")
    with pytest.raises(InvalidParameter, match=r"but this one's is 'bfloat16': load the model with .*dtype=torch\.float32"):
        Chat.load(tmp_path / "chat.kvpack", load_model(dtype=torch.bfloat16), words)


def test_a_changed_template_is_noticed(model: Any, tmp_path: Path) -> None:
    chat = Chat(model, tokenizer(), "raw")
    chat.read(HELLO)
    chat.save(tmp_path / "chat.kvpack")
    words = tokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}")
    loaded = Chat.load(tmp_path / "chat.kvpack", model, words)
    with pytest.warns(KvpackWarning, match=rf"only \d of the file's {chat.cache.tokens} tokens begin this conversation, so it is computed"):
        loaded.send(MORE, **GREEDY)
    # Once is enough: the cache is now that of this template.
    loaded.send("And?", **GREEDY)
    assert loaded.reused


@pytest.mark.parametrize(("name", "window"), [("Qwen3-Next", {}), ("Mistral", {"sliding_window": 16})])
def test_the_same_tokens_give_no_warning_even_if_the_cache_cannot_go_back(name: str, window: dict[str, int], tmp_path: Path) -> None:
    """Layers with states or a sliding window may not be able to go back after an edited message.

    Here, the template gives the same tokens as before.
    """
    other, words = model_of(name, vocab_size=264, max_position_embeddings=512, **window), tokenizer()
    chat = Chat(other, words, "raw")
    chat.read(HELLO * 14)
    chat.save(tmp_path / "chat.kvpack")
    loaded = Chat.load(tmp_path / "chat.kvpack", other, words, messages=[{"role": "user", "content": HELLO * 2}])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="only .* tokens begin this conversation")
        warnings.filterwarnings("ignore", message="the prompt and the cache begin with the same")
        loaded.send("!", **GREEDY)
    assert loaded.reused == 0
    stranger = tokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}")
    loaded = Chat.load(tmp_path / "chat.kvpack", other, stranger)
    with pytest.warns(KvpackWarning, match="only 0 of the file's"):
        loaded.send(MORE, **GREEDY)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Mistral"])
def test_a_store_supports_models_with_states_and_windows(name: str, tmp_path: Path) -> None:
    """States are stored after the last whole chunk of each prompt, so a conversation shorter than a chunk is not stored."""
    other = model_of(name, vocab_size=264, max_position_embeddings=512)
    words, identity = tokenizer(), kvpack.Identity.of(other, "raw")
    with kvpack.Store(tmp_path / "store", identity, chunk=32) as store:
        first = Chat(other, words, store=store)
        messages = [{"role": "user", "content": HELLO}]
        expected = said(other, words, messages)
        assert first.send(HELLO, **GREEDY) == expected
        second = Chat(other, words, store=store, messages=first.messages)
        expected = said(other, words, [*first.messages, {"role": "user", "content": MORE}])
        assert second.send(MORE, **GREEDY) == expected
        ends = first.prompt_tokens - 1 if name == "Qwen3-Next" else first.cache.tokens
        assert second.reused == ends // 32 * 32 > 0
        assert store.counters()["faults"] == {}
    with kvpack.Store(tmp_path / "large", identity, chunk=first.prompt_tokens) as store:
        short = Chat(other, words, store=store)
        assert short.send(HELLO, **GREEDY) == first.messages[1]["content"]
        assert store.match(short.cache.token_ids) == (0 if name == "Qwen3-Next" else first.prompt_tokens)


def test_texts_are_concatenated_without_a_template(model: Any, tmp_path: Path) -> None:
    prompt = "[[key O9B4KF = EL3GUXNT]] and some more text after that.\n"
    chat = Chat(model, ByteTokenizer(), "raw")
    chat.read({"role": "user", "content": prompt})
    chat.save(tmp_path / "file.kvpack")
    chat = Chat.load(tmp_path / "file.kvpack", model, ByteTokenizer())
    assert chat.messages == [{"role": "user", "content": prompt}]
    assert len(chat.send("[[key O9B4KF = ", max_new_tokens=8, do_sample=False).encode()) <= 8
    assert chat.reused == len(prompt) + 1
    assert chat.messages[0]["content"] == f"{prompt}[[key O9B4KF = "


def test_messages_refused_by_a_template_change_nothing(model: Any) -> None:
    chat = Chat(model, tokenizer(ALTERNATING), "raw", messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    before = list(chat.messages)
    with pytest.raises(InvalidParameter, match="rejects these messages: roles must alternate"):
        chat.send({"role": "system", "content": "c"}, **GREEDY)
    with pytest.raises(InvalidParameter, match="omit num_beams"):
        chat.send("c", num_beams=2, num_return_sequences=2, **GREEDY)
    with pytest.raises(InvalidType, match=r"a message is .*, expected a dict such as"):
        chat.send(["c"], **GREEDY)
    assert chat.messages == before
    with pytest.raises(InvalidParameter, match="no tokens: send a message that is not empty"):
        Chat(model, tokenizer(None), "raw").send("")


def test_messages_that_cannot_be_read_are_refused(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "chat.kvpack"
    # Contents may be any JSON.
    words = tokenizer("{% for message in messages %}{{ message.content }}{% endfor %}")
    chat = Chat(model, words, "raw", messages=[{"role": "tool", "content": {"city": "Paris"}}])
    chat.send(HELLO, **GREEDY)
    chat.save(path)
    assert Chat.load(path, model, words).messages == chat.messages
    with pytest.raises(InvalidParameter, match="cannot be read from the file: load all of its tokens with the tokenizer"):
        Chat.load(path, model, ByteTokenizer())
    kvpack.save(chat.cache, path)
    with pytest.raises(InvalidParameter, match=r"contains no chat messages: pass the messages"):
        Chat.load(path, model, words)
    again = Chat.load(path, model, words, messages=chat.messages)
    again.send(MORE, **GREEDY)
    assert again.reused == chat.cache.tokens


def test_texts_that_do_not_fit_in_a_file_are_refused(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "chat.kvpack"
    chat = Chat(model, tokenizer(REASONING), "raw", messages=[
        {"role": "user", "content": HELLO}, {"role": "assistant", "content": f"<think>{'x' * 70_000}</think>Hello."},
    ])  # fmt: skip
    chat.send(MORE, **GREEDY)
    with pytest.raises(LimitExceeded, match=r"takes 70,\d+ bytes, more than a file can hold"):
        chat.save(path)
    chat.save(path, messages=False)
    assert Chat.load(path, model, tokenizer(REASONING), messages=chat.messages).messages == chat.messages
    chat.messages[0]["content"] = [{"type": "image", "image": object()}]
    with pytest.raises(InvalidParameter, match=r"rejects these messages|cannot be stored as JSON"):
        chat.save(path)


@pytest.mark.skipif(not (real_model.model_folder() / "tokenizer.json").is_file(), reason=f"needs the real model: {real_model.COMMAND}")
def test_a_real_tokenizer_reconstructs_messages(tmp_path: Path) -> None:
    words = transformers.AutoTokenizer.from_pretrained(real_model.model_folder())
    torch.manual_seed(0)
    settings = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(words), **settings)).eval()
    chat = Chat(model, words, "raw")
    texts = ["  Leading spaces, 名前 ☕ and\n\nlines\n", "def f(x):\n    return x ** 2\n\n", "é" * 300]
    for text in texts:
        chat.send(text, **GREEDY)
        chat.save(tmp_path / "chat.kvpack")
        held = chat.cache.tokens
        chat = Chat.load(tmp_path / "chat.kvpack", model, words)
        assert [message["content"] for message in chat.messages[::2]] == texts[: len(chat.messages) // 2]
        assert chat.cache.tokens == held
    stored = sum(len(str(value)) for value in chat.cache.metadata.values())
    assert stored < 1000
