"""Whole programs to start from: simple_sandbox, fully_local and tmpfs_api. Each runs with `python -m`, with a key of a model or without."""
