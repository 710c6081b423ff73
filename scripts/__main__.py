"""`python -m headfold.scripts`: the `headfold` command for launchers that start modules."""

from headfold.scripts.main import main

if __name__ == "__main__":
    main()
