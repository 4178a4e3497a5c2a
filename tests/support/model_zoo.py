"""Run every text-generating architecture of transformers over packed caches, and list what works and what is refused.

``python -m support.model_zoo --write`` writes the table for the installed version to PAGE. Models are tiny and random. Keys and values are
packed without loss, so they must be restored bit for bit, and logits must agree as closely as those of the model's own eager and SDPA
attention do.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache
from transformers.models.auto import modeling_auto

import kvpack
from kvpack.integrations.transformers import KvpackCache, recording
from support.tiny_configs import tiny_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = Path(__file__).parents[2] / "kvpack" / "integrations" / "transformers" / "README.md"
RECIPE = "raw"
STEPS = ("pack", "save", "load", "continue", "beam", "crop", "store", "generate")
PROMPT, FOLLOWING = torch.arange(3, 35)[None], torch.tensor([[7, 40, 9, 22, 5]])
CHUNK = 16

ROUNDING = 16 * torch.finfo(torch.float32).eps
"""Smallest tolerance of logits, relative to the largest logit.

It applies to models whose two attention functions agree more closely, or that have only one.
"""


KINDS = {
    "AutoModelForCausalLM": (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, ""),
    "AutoModelForSeq2SeqLM": (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, " (sequence to sequence)"),
}
"""The auto classes of transformers, each with its table of model classes and the suffix that names of its rows have."""


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers and the auto class that creates its model."""

    model_type: str
    kind: str = "AutoModelForCausalLM"

    @property
    def name(self) -> str:
        return self.model_type + KINDS[self.kind][1]

    def model(self) -> Any:
        """Return the model, which has the same weights in every process."""
        torch.manual_seed(0)
        config = tiny_config(self.model_type)
        if self.kind == "AutoModelForCausalLM" and hasattr(config, "is_decoder"):
            config.is_decoder = True
        model = getattr(transformers, self.kind).from_config(config).eval()
        if hasattr(model, "set_default_language"):
            model.set_default_language("en_XX")
        # Parameters that a model leaves uninitialized, such as sinks, are effectively random.
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        first = 0 if model.config.is_encoder_decoder else None
        settings = {"forced_bos_token_id": None, "forced_eos_token_id": None, "decoder_start_token_id": first}
        model.generation_config.update(eos_token_id=None, bos_token_id=0, pad_token_id=0, **settings)
        return model


ZOO = [Architecture(name, kind) for kind, (names, _) in KINDS.items() for name in names]
"""Every architecture of the installed transformers."""


class CannotRun(Exception):
    """Raised if transformers itself cannot create or run a model of these sizes."""


@dataclass
class Row:
    """The results for one architecture.

    ``refused`` and ``wrong`` give the reason for each step that failed. All other steps work. ``not_run`` is the reason why transformers
    itself cannot run such a model.
    """

    name: str
    refused: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    not_run: str = ""

    @property
    def works(self) -> list[str]:
        return [step for step in STEPS if not self.not_run and step not in self.refused and step not in self.wrong]


class Subject:
    """A model of one architecture, the dense cache of a prompt, and the expected logits of a continuation."""

    def __init__(self, architecture: Architecture, folder: Path) -> None:
        self.name, self.file = architecture.name, folder / f"{architecture.name}.kvpack"
        try:
            self.model = architecture.model()
            self.encoder = self.model.config.is_encoder_decoder
            alone = self.forward(PROMPT, self.empty())
            if not torch.isfinite(alone.logits).all() or alone.past_key_values.get_seq_length() != PROMPT.shape[1]:
                raise CannotRun(f"{type(self.model).__name__} does not fill the cache, or its logits are not finite")
            self.continue_over(alone.past_key_values)
        except Exception as error:
            if hasattr(self, "model"):
                # A model whose cache has no layers is refused before it runs.
                KvpackCache(self.model, RECIPE).release()
            raise error if isinstance(error, CannotRun) else CannotRun(f"{type(error).__name__}: {error}") from None
        self.attention = self.model.config._attn_implementation
        with recording(self.model) as record:
            self.dense = self.forward(PROMPT, self.empty()).past_key_values
        self.inputs = [record.inputs(cache) for cache in self.caches(self.dense)]
        self.expected, self.tolerance = self._expected()

    def empty(self) -> Any:
        """Return an empty dense cache that has the sliding windows of the model's decoder."""
        if self.encoder:
            return EncoderDecoderCache(DynamicCache(config=self.model.config), DynamicCache())
        return DynamicCache(config=self.model.config)

    def forward(self, ids: torch.Tensor, past: Any) -> Any:
        if self.encoder:
            return self.model(input_ids=PROMPT, decoder_input_ids=ids, past_key_values=past)
        return self.model(ids, past_key_values=past)

    def _expected(self) -> tuple[torch.Tensor, float]:
        """Return the logits of the continuation over the dense cache, and their tolerance."""
        logits = []
        for attention in ("eager", "sdpa"):
            if attention != self.attention and not (self.model._can_set_attn_implementation() and self.model._supports_sdpa):
                continue
            self.model.set_attn_implementation(attention)
            logits.append(self.continue_over(copy.deepcopy(self.dense)))
        self.model.set_attn_implementation(self.attention)
        spread = float((logits[0] - logits[-1]).abs().max())
        return logits[-1], max(spread, ROUNDING * float(logits[0].abs().max()))

    def caches(self, past: Any) -> list[Any]:
        """Return the key-value caches inside ``past``."""
        return [past.self_attention_cache, past.cross_attention_cache] if self.encoder else [past]

    def pack(self) -> list[kvpack.Cache]:
        caches = self.caches(self.dense)
        return [kvpack.pack(past, RECIPE, inputs=inputs) for past, inputs in zip(caches, self.inputs, strict=True)]

    def whole(self) -> kvpack.Cache:
        """Return the packed cache of a decoder, with all tokens even in sliding windows.

        ``kvpack.prefill`` does not support encoder inputs.
        """
        parts = [KvpackCache(self.model, RECIPE, keep_all=True) for _ in self.caches(self.dense)]
        self.forward(PROMPT, EncoderDecoderCache(*parts))
        result = parts[0].packed
        for part in parts:
            part.release()
        return result

    def over(self, packed: list[kvpack.Cache]) -> Any:
        """Return the cache object with which the model continues from packed caches."""
        self.model.set_attn_implementation("kvpack" if self.model._can_set_attn_implementation() else self.attention)
        caches = [KvpackCache.of(cache, self.model) for cache in packed]
        return EncoderDecoderCache(*caches) if self.encoder else caches[0]

    def continue_over(self, past: Any, ids: torch.Tensor = FOLLOWING) -> torch.Tensor:
        """Return the logits of ``ids`` over ``past``. The last two ids take one pass each, and all others share one pass."""
        parts = ids.split([ids.shape[1] - 2, 1, 1], 1)
        return torch.cat([self.forward(part, past).logits for part in parts], 1)

    def chunked_logits(self, tokens: int) -> torch.Tensor:
        """Return the logits of the continuation over a dense cache whose prompt was computed ``tokens`` tokens at a time.

        Recurrent layers round differently in passes of other lengths.
        """
        past = self.empty()
        for part in PROMPT.split(tokens, 1):
            past = self.forward(part, past).past_key_values
        return self.continue_over(past)

    def check(self, actual: torch.Tensor, expected: torch.Tensor | None = None) -> None:
        difference = float((actual - (self.expected if expected is None else expected)).abs().max())
        assert difference <= self.tolerance, f"logits differ by {difference:.2e}, the limit is {self.tolerance:.2e}"


def check_same_bits(packed: kvpack.Cache, dense: Any) -> None:
    """Assert that the packed keys and values are a bitwise prefix of those in a dense cache.

    If both end at the same token, their states must match, too.
    """
    for number, (mine, theirs) in enumerate(zip(packed, dense.layers, strict=True)):
        if packed.tokens == dense.get_seq_length():
            states = {f"conv.{i}": state for i, state in getattr(theirs, "conv_states", {}).items() if state is not None}
            states |= {f"recurrent.{i}": state for i, state in getattr(theirs, "recurrent_states", {}).items() if state is not None}
            assert mine.states.keys() == states.keys(), f"layers[{number}] has the states {list(mine.states)}"
            assert all(torch.equal(mine.states[name], state) for name, state in states.items()), f"layers[{number}] has different states"
        k, v = mine.unpack(torch.float32)
        if getattr(theirs, "keys", None) is None:
            assert k is None
            assert v is None
            continue
        assert torch.equal(k[:, :, : theirs.keys.shape[2]], theirs.keys), f"layers[{number}].k differs"
        assert torch.equal(v[:, :, : theirs.keys.shape[2]], theirs.values), f"layers[{number}].v differs"


def pack(subject: Subject) -> None:
    for cache, dense in zip(subject.pack(), subject.caches(subject.dense), strict=True):
        check_same_bits(cache, dense)


def save(subject: Subject) -> None:
    for number, (cache, dense) in enumerate(zip(subject.pack(), subject.caches(subject.dense), strict=True)):
        path = subject.file.with_suffix(f".{number}.kvpack")
        kvpack.save(cache, path)
        check_same_bits(kvpack.load(path), dense)


def continue_text(subject: Subject) -> None:
    over = subject.over(subject.pack())
    if subject.encoder:
        try:
            subject.model(input_ids=PROMPT.flip(1), decoder_input_ids=FOLLOWING, past_key_values=over)
        except kvpack.KvpackError as error:
            if "different source" not in str(error):
                raise
        else:
            raise AssertionError("the caches were continued with a different source")
    subject.check(subject.continue_over(over))
    for cache, dense in zip(subject.caches(over), subject.caches(subject.dense), strict=True):
        check_same_bits(cache.packed, dense)
    assert over.get_seq_length() == PROMPT.shape[1] + FOLLOWING.shape[1]


def search_beams(subject: Subject) -> None:
    over, dense = subject.over(subject.pack()), copy.deepcopy(subject.dense)
    indices = torch.tensor([0, 0, 0])
    for cache, other in zip(subject.caches(over), subject.caches(dense), strict=True):
        cache.batch_repeat_interleave(3)
        # transformers' layers with states have no batch_repeat_interleave.
        other.reorder_cache(indices)
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        check_same_bits(cache.packed, other)
    if subject.encoder:
        over.reorder_cache(indices)
        return
    ids = torch.cat([PROMPT, FOLLOWING], 1)
    options = {"num_beams": 3, "do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "use_cache": True}
    found = subject.model.generate(ids, past_key_values=over, **options)
    subject.model.set_attn_implementation(subject.attention)
    assert found.tolist() == subject.model.generate(ids, past_key_values=dense, **options).tolist(), (
        "beam search generated different tokens"
    )


def crop(subject: Subject) -> None:
    over = subject.over(subject.pack())
    subject.continue_over(over)
    for cache in subject.caches(over)[:1]:
        cache.crop(-FOLLOWING.shape[1])
    subject.check(subject.continue_over(over))


def store(subject: Subject) -> None:
    identity = kvpack.Identity.of(subject.model, RECIPE)
    if identity.windows or identity.keeps_states:
        # transformers' own cache has dropped tokens, and has only the last states.
        every = CHUNK if identity.keeps_states else PROMPT.shape[1]
        subject.model.set_attn_implementation(subject.attention)
        expected = subject.chunked_logits(every)
        with kvpack.prefill(subject.model, PROMPT, RECIPE, every=every, chunk=CHUNK) as computed:
            cache = computed.packed
    else:
        cache, expected = subject.pack()[0], None
        if any(layer.skipped for layer in cache):
            cache = subject.whole()
    # The encoder's input also determines the decoder's keys and values, so every key includes it.
    inputs = [b"the zoo's input", *[b""] * (PROMPT.shape[1] // CHUNK - 1)] if subject.encoder else None
    with kvpack.Store(subject.file.with_suffix(".store"), identity, chunk=CHUNK) as prefixes:
        assert prefixes.save(PROMPT, cache, inputs=inputs) == PROMPT.shape[1], (
            f"some tokens were not stored; the store's statistics are {prefixes.stats()}"
        )
        tokens, loaded = prefixes.load(PROMPT, inputs=inputs)
        assert tokens == PROMPT.shape[1], f"{tokens} tokens were found"
        assert inputs is None or prefixes.match(PROMPT) == 0, "a prefix was found without the encoder's input"
        for number, (mine, whole) in enumerate(zip(loaded, cache, strict=True)):
            assert mine.states.keys() == whole.states.keys()
            assert all(torch.equal(state, whole.states[name]) for name, state in mine.states.items()), (
                f"layers[{number}] has different states"
            )
            for name, side in mine.sides.items():
                held = whole.sides[name].unpack(torch.float32)[:, :, mine.skipped :]
                assert torch.equal(side.unpack(torch.float32), held), f"layers[{number}].{name} differs"
        subject.check(subject.continue_over(subject.over([loaded, *subject.pack()[1:]])), expected)


def generate(subject: Subject) -> None:
    """Generate as users do, and expect the tokens that transformers' own cache gives.

    The runs start from an empty cache, with a padded batch, and with beams.
    """
    subject.model.set_attn_implementation(subject.attention)
    padded = torch.cat([PROMPT, torch.nn.functional.pad(PROMPT[:, 9:], (9, 0))])
    for options in ({}, {"num_beams": 2}):
        options = {"attention_mask": (padded != 0).long(), "max_new_tokens": 12, "do_sample": False, "use_cache": True, **options}
        expected = subject.model.generate(padded, pad_token_id=0, **options)
        parts = [KvpackCache(subject.model, RECIPE) for _ in subject.caches(subject.dense)]
        over = EncoderDecoderCache(*parts) if subject.encoder else parts[0]
        found = subject.model.generate(padded, past_key_values=over, pad_token_id=0, **options)
        for part in parts:
            part.release()
        assert found.tolist() == expected.tolist(), f"generate returned different tokens with {sorted(options)}"
        assert over.get_seq_length() == found.shape[1] - 1


def load_elsewhere(subject: Subject) -> None:
    """Continue in this process from the files that ``save`` wrote in another."""
    packed = [kvpack.load(subject.file.with_suffix(f".{number}.kvpack")) for number in range(2 if subject.encoder else 1)]
    subject.check(subject.continue_over(subject.over(packed)))


HERE: dict[str, Callable[[Subject], None]] = {
    "pack": pack,
    "save": save,
    "continue": continue_text,
    "beam": search_beams,
    "crop": crop,
    "store": store,
    "generate": generate,
}
ELSEWHERE: dict[str, Callable[[Subject], None]] = {"load": load_elsewhere}


@contextlib.contextmanager
def ignore_warnings() -> Iterator[None]:
    """Ignore kvpack's warnings while the context is active, even in tests, because decoding layers is not an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kvpack.KvpackWarning)
        yield


def examine(row: Row, subject: Subject, steps: dict[str, Callable[[Subject], None]]) -> None:
    """Run the steps, and record in ``row`` which of them were refused and which gave wrong results."""
    for name, step in steps.items():
        if name == "load" and "save" not in row.works:
            continue
        try:
            with torch.no_grad(), ignore_warnings():
                step(subject)
        except kvpack.KvpackError as error:
            row.refused[name] = str(error)
            if name == "pack":
                row.refused = dict.fromkeys(STEPS, str(error))
                return
        except Exception as error:
            row.wrong[name] = f"{type(error).__name__}: {error}"


def examine_here(architectures: list[Architecture], folder: Path, steps: dict[str, Callable[[Subject], None]]) -> list[Row]:
    """Run the given steps for ``architectures`` in this process and return their rows."""
    rows = []
    for architecture in architectures:
        row = Row(architecture.name)
        rows.append(row)
        try:
            with torch.no_grad(), ignore_warnings():
                subject = Subject(architecture, folder)
        except CannotRun as error:
            row.not_run = str(error)
        except kvpack.KvpackError as error:
            row.refused = dict.fromkeys(STEPS, str(error))
        except Exception as error:
            row.wrong["pack"] = f"{type(error).__name__}: {error}"
        else:
            examine(row, subject, steps)
    return rows


def examine_all(architectures: list[Architecture], folder: Path, python: str = sys.executable, share: int = 1) -> list[Row]:
    """Return one row per architecture.

    Another process, which ``python`` starts, creates the models again and loads the files of one in ``share`` architectures.
    """
    rows, elsewhere = [], set()
    for number, architecture in enumerate(architectures):
        if number % share == 0:
            elsewhere.add(architecture.name)
        rows += examine_here([architecture], folder, HERE if architecture.name in elsewhere else HERE | ELSEWHERE)
    saved = {row.name: row for row in rows if row.name in elsewhere and "save" in row.works}
    if not saved:
        return rows
    command = [python, "-m", "support.model_zoo", "--elsewhere", str(folder), *saved]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    for row in rows:
        if "save" in row.refused:
            row.refused.setdefault("load", row.refused["save"])
    for name, found in json.loads(child.stdout.splitlines()[-1]).items():
        saved[name].refused |= found["refused"]
        saved[name].wrong |= found["wrong"]
    return rows


def counts(rows: list[Row]) -> dict[str, int]:
    """Count the architectures for which all, some, or no steps work, those with a wrong result, and those that were not run."""
    ran = [row for row in rows if not row.not_run]
    right = [row for row in ran if not row.wrong]
    return {
        "work in every step": sum(not row.refused for row in right),
        "refused in some steps": sum(bool(row.refused and row.works) for row in right),
        "refused": sum(not row.works for row in right),
        "wrong": len(ran) - len(right),
        "not run": len(rows) - len(ran),
    }


_SPECIFIC = re.compile(r"\d+(, \d+)*|\w*(Layer|Cache|For\w+|LMHead\w*)\b|(conv|recurrent)\.( and )?")
"""Pattern of the parts in which messages with the same reason may differ: numbers, classes, and names of states."""


def table(rows: list[Row]) -> str:
    """Format the rows as a Markdown table in descending order of working steps.

    Architectures with the same results and reasons share a row.
    """
    lines = ["| architectures | works | refused because |", "|---|---|---|"]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        whys = [*row.wrong.values(), *row.refused.values()] if not row.not_run else ["not run"]
        groups.setdefault((*row.works, *dict.fromkeys(_SPECIFIC.sub("", why) for why in whys)), []).append(row)
    for alike in sorted(groups.values(), key=lambda group: (bool(group[0].not_run), -len(group[0].works), -len(group))):
        first = alike[0]
        reasons = [f"{step} WRONG: {why}" for step, why in first.wrong.items()] + [*dict.fromkeys(first.refused.values())]
        works = "all" if first.works == list(STEPS) else ", ".join(first.works) or "none"
        if first.not_run:
            works, reasons = "not run", ["transformers alone cannot build or run such a model at these sizes"]
        lines.append(f"| {', '.join(row.name for row in alike)} | {works} | {'; '.join(reasons)} |")
    return "\n".join(lines)


def page(rows: list[Row]) -> str:
    """Return the text of PAGE for the results in ``rows``."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    summary = ", ".join(f"{count} {what}" for what, count in counts(rows).items())
    found = f"transformers {transformers.__version__}, {len(rows)} architectures: {summary}."
    return f"{before}{BEGIN}\n{found}\n\n{table(rows)}\n{END}{after}"


def parse_table(text: str) -> dict[str, tuple[str, str]]:
    """Parse a table and return the working steps, and the reasons for refusals, of each architecture.

    Details that differ within a row are left out.
    """
    lines = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| ")][1:]
    return {name.strip(): (works.strip(), _SPECIFIC.sub("", why).strip()) for names, works, why in lines for name in names.split(", ")}


BEGIN, END = "<!-- make zoo -->\n", "<!-- end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures to examine, such as bart or 'bart (sequence to sequence)' (default: all)")
    parser.add_argument("--write", action="store_true", help=f"write the integration's {PAGE.name}, with all architectures")
    parser.add_argument("--elsewhere", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [architecture for architecture in ZOO if not options.names or architecture.name in options.names]
    if options.elsewhere:
        rows = examine_here(chosen, options.elsewhere, ELSEWHERE)
        print(json.dumps({row.name: {"refused": row.refused, "wrong": row.wrong} for row in rows}))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = examine_all(chosen, Path(folder))
    print(table(rows))
    print(counts(rows))
    for row in rows:
        if row.not_run:
            print(f"not run: {row.name}: {' '.join(row.not_run.split())[:200]}")
    if options.write and not options.names:
        PAGE.write_text(page(rows), encoding="utf-8")
    sys.exit(any(row.wrong for row in rows))


if __name__ == "__main__":
    main()
