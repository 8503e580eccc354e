"""The two files, profile and policy: frozen dataclasses, written whole, read with suspicion."""
