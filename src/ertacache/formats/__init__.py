"""The policy file, profile and plans: frozen dataclasses, written atomically, validated on load."""
