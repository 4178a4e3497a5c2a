"""The JavaScript reader opens a store's entries, encrypted or not, and refuses all but the requested entry."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from support import spec_readers
from support.store_caches import CHUNK, KEYS, OTHER_KEYS, open_store, prompt, save

PROGRAM = """
import { readFileSync } from "node:fs";
const [folder, input] = process.argv.slice(1);
const store = await import(`${folder}/store.js`);
const { hex } = await import(`${folder}/numbers.js`);
const bytes = (text) => Uint8Array.from(Buffer.from(text, "hex"));
const { identity, tenant, ids, place, keys, others } = JSON.parse(input);
const given = (found) => new Map(Object.entries(found).map(([id, key]) => [id, bytes(key)]));
let parent = await store.rootKey({ ...identity, tenant });
const answers = [];
for (const n of [0, 1]) {
  const key = await store.chunkKey(parent, ids.slice(n * 32, (n + 1) * 32));
  const name = hex(key);
  let data = new Uint8Array(readFileSync(`${place}/${name[0]}/${name[1]}/${name}`));
  const answer = {};
  if (keys) {
    answer.others = await store.decryptEntry(data, given(others), key, tenant);
    answer.another = await store.decryptEntry(data, given(keys), parent, tenant);
    const changed = data.slice();
    changed[100] ^= 1;
    answer.changed = await store.decryptEntry(changed, given(keys), key, tenant).catch((error) => error.kind);
    data = await store.decryptEntry(data, given(keys), key, tenant);
  }
  const entry = await store.openChunk(data, key, { identity, start: n * 32 });
  const refused = (expected, at = key) => store.openChunk(data, at, expected).then(() => "taken", (error) => error.rule);
  answer.ids = entry.ids;
  answer.parent = hex(entry.parent) === hex(parent);
  answer.start = await refused({ identity, start: 1 });
  answer.recipe = await refused({ identity: { ...identity, recipe: "raw" }, start: n * 32 });
  answer.key2 = await refused({ identity, start: n * 32 }, parent);
  answer.values = (await entry.file.decode(0, "k")).values.length;
  answers.push(answer);
  parent = key;
}
console.log(JSON.stringify(answers));
"""


@pytest.mark.scenario
@pytest.mark.parametrize("encrypted", [False, True])
def test_the_reader_returns_the_contents_of_store_entries(tmp_path: Path, encrypted: bool) -> None:
    if reason := spec_readers.missing_reason("javascript"):
        pytest.skip(reason)
    ids = prompt(2)
    with open_store(tmp_path, **({"encryption": KEYS} if encrypted else {})) as store:
        save(store, ids)
        recipe = store.identity.recipe
    told = {
        "identity": {"model": "model", "recipe": recipe, "weights": "w1", "dtype": "bfloat16"},
        "tenant": "tenant",
        "ids": ids,
        "place": str(tmp_path),
        "keys": {id: key.hex() for id, key in KEYS.items()} if encrypted else None,
        "others": {id: key.hex() for id, key in OTHER_KEYS.items()},
    }
    folder = spec_readers.ROOT / "spec" / "readers" / "javascript"
    command = ["node", "--input-type=module", "--eval", PROGRAM, str(folder), json.dumps(told)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert len(found) == 2
    for n, answer in enumerate(found):
        assert answer["ids"] == ids[n * CHUNK : (n + 1) * CHUNK]
        assert answer["parent"]
        assert (answer["start"], answer["recipe"], answer["key2"]) == ("store-2",) * 3
        assert answer["values"] == 2 * CHUNK * 32
        if encrypted:
            assert (answer["others"], answer["another"], answer["changed"]) == (None, None, "DigestMismatch")
