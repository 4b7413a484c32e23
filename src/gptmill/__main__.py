"""`python -m gptmill`, the form that torchrun launches."""

from gptmill.cli.entry import main

if __name__ == "__main__":
    raise SystemExit(main())
