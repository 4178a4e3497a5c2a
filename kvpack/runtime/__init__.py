"""What kvpack takes of the process that it is a guest in: threads, memory, reads of files, locks and modes of floats."""
