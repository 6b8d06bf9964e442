"""Run the command line with `python -m enginery`."""

from enginery.cli import main

if __name__ == "__main__":
    main()
