"""Helpers that tests share, and programs that run at length what tests check in part."""
