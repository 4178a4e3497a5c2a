"""Shared resources of the host process: threads, memory, file reads, locks and floating-point modes."""
