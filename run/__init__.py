"""The life of a run: what builds it, its folder, checkpoints, metrics and lines."""
