"""Test isolation: every tenant, adapter and model looks up prompts that all others have stored (tests/support/store_lookups.py)."""

from __future__ import annotations

import dataclasses
import itertools
import warnings

import kvpack
from support import store_lookups
from support.store_matrix.cells import Cell
from support.store_matrix.kinds import Place

MIN_THOROUGH_LOOKUPS = 10_000
"""Minimum number of lookups for which more prompts, and models with adapters, which take seconds to create, are included."""


def check_lookups(place: Place, cell: Cell, count: int, seed: int = 0) -> None:
    """Look up prompts that others have stored ``count`` times. Only their owners may find them."""
    place.clear()
    place.budget = None
    identities = [*store_lookups.IDENTITIES, *near_identities(), *(adapter_identities() if count >= MIN_THOROUGH_LOOKUPS else [])]
    report = store_lookups.run_lookups(
        lambda identity: place.open(identity, chunk=store_lookups.CHUNK),
        count,
        500 if count >= MIN_THOROUGH_LOOKUPS else 60,
        seed=seed,
        identities=list(dict.fromkeys(identities)),
        progress=lambda done, total: cell.report_done(done - cell.counts["cases"], of=total),
    )
    cell.counts["cases"] = report["lookups"]
    cell.counts["identities"] = report["identities"]
    cell.counts["own_hits"] = report["prompts"] - report["owners_that_found_something_else"]
    for what in ("hits", "refused", "owners_that_found_something_else"):
        if report[what]:
            cell.problem(f"{report[what]} of {report['lookups']} lookups had {what.replace('_', ' ')}")


def near_identities() -> list[kvpack.Identity]:
    """Return identities that differ from one identity in a single field, and identities whose fields split the same text elsewhere."""
    base = kvpack.Identity("model", "bf16", weights="w1", adapter="a", dtype="bfloat16", tenant="tenant")
    # Fields that are not in keys do not distinguish identities.
    fields = [field.name for field in dataclasses.fields(base) if field.compare and field.name != "recipe"]
    found = [base]
    for name in fields:
        known = getattr(base, name)
        others = (f"{known}2", f"{known} ", f"{known}\u0301", "b" if known else "a")
        found += (dataclasses.replace(base, **{name: other}) for other in others)
    for first, second in itertools.pairwise(fields):
        found += (dataclasses.replace(base, **{first: "ab"[:cut], second: "ab"[cut:]}) for cut in (0, 1, 2))
    return found


def adapter_identities() -> list[kvpack.Identity]:
    """Return identities of small models with PEFT adapters in every state, or no identities without PEFT."""
    try:
        import peft
        import torch
    except ImportError:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from support.small_models import small_llama

        found = []
        for seed in range(3):
            torch.manual_seed(seed)
            lora = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
            model = peft.get_peft_model(small_llama(), lora).eval()
            model.add_adapter("second", lora)
            for change in (None, "second", "off", "scaled"):
                if change == "second":
                    model.set_adapter("second")
                if change == "scaled":
                    for module in model.modules():
                        if isinstance(getattr(module, "scaling", None), dict):
                            module.scaling["second"] *= 2
                if change == "off":
                    with model.disable_adapter():
                        found.append(kvpack.Identity.of(model, "bf16", name="model", weights="revision"))
                else:
                    found.append(kvpack.Identity.of(model, "bf16", name="model", weights="revision"))
    return found
