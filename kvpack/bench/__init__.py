"""Benchmarks of kvpack on this machine, such as its speed (io) and the loss of model quality from packing (quality)."""
