"""The benchmark: every method on the same prompts and seeds, in one process."""
