"""Helpers that tests share, and programs that run the complete versions of checks that tests only sample."""
