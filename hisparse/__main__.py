"""``python -m hisparse``: the same as the ``hisparse`` command."""

import sys

from hisparse.cli import main

if __name__ == "__main__":
    sys.exit(main())
