"""The command line as ``python -m ertacache.cli``."""

from ertacache.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
