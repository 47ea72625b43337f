"""What `hxla run` starts: join the job, then run the script."""

from .join import main

main()
