"""The commands of the command line, one module each. Modules import their dependencies only when they run."""
