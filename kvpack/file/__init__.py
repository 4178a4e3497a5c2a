"""Read and write kvpack files as arrays and bytes, without PyTorch."""
