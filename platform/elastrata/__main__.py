"""`python -m elastrata`: the command, where no script of that name is installed."""

from elastrata.cli.main import main

if __name__ == "__main__":
    main()
