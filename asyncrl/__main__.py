"""`python -m asyncrl` is the `asyncrl` command."""

from asyncrl.cli import main

if __name__ == "__main__":
    main()
