"""Settings of all property tests: no example fails for the time that it took."""

from hypothesis import settings

settings.register_profile("kvpack", deadline=None)
settings.load_profile("kvpack")
