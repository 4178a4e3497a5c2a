"""The commands of the command line, one module each; every module imports what it needs when it runs."""
