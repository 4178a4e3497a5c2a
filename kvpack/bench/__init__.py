"""Measurements of kvpack on this machine: of speed (io), and of the quality that packing costs a model (quality)."""
