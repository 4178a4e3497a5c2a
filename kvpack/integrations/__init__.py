"""Bridges to other libraries, one module each. Importing a bridge requires its library."""
