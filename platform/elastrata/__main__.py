"""Entry point of `python -m elastrata`, for environments without the installed script."""

from elastrata.cli.main import main

if __name__ == "__main__":
    main()
