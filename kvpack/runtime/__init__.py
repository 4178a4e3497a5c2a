"""Process-wide resources: threads, memory, file reads, locks and floating-point modes."""
