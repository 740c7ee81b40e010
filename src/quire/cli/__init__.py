"""The command line of quire."""


def main() -> int:
    """Run the command line; returns the exit status."""
    print("quire: no command yet")
    return 0
