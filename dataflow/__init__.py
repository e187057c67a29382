"""Columns in, columns out: stages of RL post-training over a columnar queue."""
