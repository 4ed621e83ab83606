"""``python -m tests.fuzz``: many random compositions, each beside a plain loop; it goes on where it was stopped."""

import sys

from tests.fuzz.runner import main

if __name__ == "__main__":
    sys.exit(main())
