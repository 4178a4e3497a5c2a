"""The commands of the command line, one module each; every module imports its dependencies when it runs."""
