"""Both methods as mathematics on tensors: torch and the standard library, nothing else."""
