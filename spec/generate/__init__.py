"""The conformance vectors and what makes them."""
