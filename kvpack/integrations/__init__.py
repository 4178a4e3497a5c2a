"""Adapters to other libraries, one module or package for each. Importing one requires its library."""
