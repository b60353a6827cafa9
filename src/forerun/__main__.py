"""`python -m forerun`: the command line."""

from forerun.cli import main

if __name__ == "__main__":
    main()
