"""`python -m prfaas`."""

from prfaas.cli.main import main

if __name__ == "__main__":
    main()
