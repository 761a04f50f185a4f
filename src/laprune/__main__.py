"""``python -m laprune`` is the command ``laprune``."""

from laprune.cli import main

if __name__ == "__main__":
    main()
