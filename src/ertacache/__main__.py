"""The command line as ``python -m ertacache``, which ``accelerate launch -m ertacache`` starts."""

from ertacache.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
