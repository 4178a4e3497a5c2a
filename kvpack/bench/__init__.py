"""Measurements of kvpack on this machine: of speed (io) and of what packing costs a model (quality)."""
