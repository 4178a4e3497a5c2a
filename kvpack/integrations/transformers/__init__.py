"""transformers models over packed layers, without a decompressed copy of the cache::

    cache = kvpack.load("prompt.kvpack")
    model.set_attn_implementation("kvpack")
    KvpackCache.of(cache, model).generate(token_ids)

Importing this package registers the attention "kvpack". It runs causal and sliding-window attention over packed layers. Plain tensors, such
as those of a prefill, are passed to the model's own attention: scaled dot product attention if the model supports it, otherwise eager
attention. With "kvpack|eager", they are passed to eager attention. A KvpackCache that knows its model records the inputs of its tokens,
rejects a cache of another model, and decodes layers for models whose attention accepts only tensors.
"""

from kvpack.integrations.transformers_version import installed_transformers

# Check first: the errors of the imports below would not name the package to install.
installed_transformers()

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402

from .attention_function import attention  # noqa: E402
from .cache import KvpackCache  # noqa: E402
from .chat import Chat  # noqa: E402
from .hooks import recording  # noqa: E402
from .masks import mask  # noqa: E402
from .plain_attention import NAMES  # noqa: E402
from .prefill import prefill  # noqa: E402

__all__ = ["Chat", "KvpackCache", "attention", "mask", "prefill", "recording"]

for _name in NAMES:
    AttentionInterface.register(_name, attention)
    AttentionMaskInterface.register(_name, mask)
