"""`python -m asyncrl` is the `asyncrl` command."""

from asyncrl.process import lifeline

if __name__ == "__main__":
    lifeline.bind_to_launcher()  # where a launcher starts a command, it ends with it

from asyncrl.cli import main

if __name__ == "__main__":
    main()
