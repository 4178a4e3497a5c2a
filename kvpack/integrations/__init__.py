"""Adapters to other libraries, one module each. Importing one requires its library."""
