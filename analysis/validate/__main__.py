"""The command; see `command`."""

import sys

from analysis.validate.command import main
from sim.errors import exit_code_of

if __name__ == "__main__":
    sys.exit(exit_code_of(main))
