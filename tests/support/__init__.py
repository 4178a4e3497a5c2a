"""Helpers shared by tests, and programs that run the long versions of what tests only sample."""
