"""What tests know of the insides of `hxla._src.job`."""

from hxla._src.job.agreement import agree
from hxla._src.job.context import JobContext
