"""What `hxla run` starts: join the job, then run the script."""

import sys

from .join import run_script

run_script(sys.argv[1:])
