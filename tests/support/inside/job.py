"""What tests know of the insides of `hxla._src.job`."""

from hxla._src.job.context import JobContext
from hxla._src.job.facts import told_differences, told_of_run
