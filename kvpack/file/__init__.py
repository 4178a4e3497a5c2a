"""Reading and writing of kvpack files as arrays and bytes, without PyTorch."""
