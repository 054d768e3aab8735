"""`python -m distca` is the `distca` command, for checkouts that are not installed."""

from distca.cli import main

if __name__ == "__main__":
    main()
