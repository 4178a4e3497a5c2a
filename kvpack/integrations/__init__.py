"""Bridges to other libraries, one module each; importing one needs that library."""
