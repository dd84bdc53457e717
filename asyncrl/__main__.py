"""`python -m asyncrl` is the `asyncrl` command."""

from asyncrl.cli import hidden, main

if __name__ == "__main__":
    hidden.tell()  # before an import that fails
    from asyncrl.process import lifeline

    lifeline.bind_to_launcher()  # where a launcher starts a command, it ends with it
    main()
