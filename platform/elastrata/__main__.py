"""Entry point of `python -m elastrata`, for environments without the installed script."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # As with the installed script, a file such as queue.py in the current folder hides nothing.
        del sys.path[0]
        sys.path.append("")
    from elastrata.cli.main import main

    main()
