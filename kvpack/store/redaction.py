"""Removes users, passwords and keys from URLs in text that people see."""

from __future__ import annotations

import re
from typing import Any

_HIDDEN = "***"
_QUERY_SECRETS = re.compile(r"([?&;][^=&;\s]*(?:user|pass|secret|token|key|credential|sig)[^=&;\s]*=)[^&\s]*", re.IGNORECASE)
"""Pattern of query options such as ``?password=`` and ``&sig=``."""
_USERS = re.compile(r"\b(rediss?://)\S*@|\b(unix://)\S*@(?=/)|(//)[^/?#\s]*@", re.IGNORECASE)
"""Pattern of the user and password in a URL. A password may contain any character, even one that is invalid in a URL.

The path of a Redis URL contains no @.
"""


def redacted_location(location: Any) -> str:
    """Return a location as text, without users, passwords and keys in URLs. ``location`` may also be text that contains URLs."""
    if isinstance(location, (list, tuple)):
        return f"[{', '.join(map(redacted_location, location))}]"
    text = _QUERY_SECRETS.sub(rf"\1{_HIDDEN}", str(location))
    return _USERS.sub(lambda match: f"{next(filter(None, match.groups()))}{_HIDDEN}@", text)
