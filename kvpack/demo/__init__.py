"""Demos of files and of the store, which ``kvpack demo`` runs."""
