"""``python -m torchdefine`` is the command line, so that torchrun can start it."""

from torchdefine.cli import main

if __name__ == "__main__":
    main()
