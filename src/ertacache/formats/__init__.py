"""The two files, profile and policy: frozen dataclasses, written atomically, validated on load."""
