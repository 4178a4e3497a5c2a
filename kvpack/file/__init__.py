"""The container: files and bytes to arrays and back, without torch."""
