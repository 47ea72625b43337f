"""What tests know of the insides of `hxla._scheduler`."""

from hxla._scheduler._device_proposals import ExecutorTime, Trials, learned, proposals
from hxla._scheduler._elastic_jobs import ActiveJob, ElasticJob, Situation, fits, free_devices, plus
from hxla._scheduler._gang_policies import backfill, one_at_a_time, shortest_remaining
from hxla._scheduler._job_traces import read_jobs
from hxla._scheduler._live_commands import LIVE_POLICIES
from hxla._scheduler._live_jobs import LiveJob, read_live_jobs
from hxla._scheduler._live_ray import RayFleet
from hxla._scheduler._live_record import (
    Decided,
    Holds,
    as_line,
    as_simulation,
    decided_otherwise,
    read_record,
)
from hxla._scheduler._live_run import LiveSchedule, Places
from hxla._scheduler._returns import returned
from hxla._scheduler._schedule_commands import GANGS, POLICIES
from hxla._scheduler._simulator import simulate
from hxla._scheduler._waste import MOST_WASTE, Capability, best_configuration, configuration
