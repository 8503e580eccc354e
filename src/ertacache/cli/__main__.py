"""The command line as ``python -m ertacache.cli``. Knows only where it begins."""

from ertacache.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
