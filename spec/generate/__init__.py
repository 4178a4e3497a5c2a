"""Generate the conformance vectors."""
