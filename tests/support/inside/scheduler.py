"""What tests know of the insides of `hxla._src.scheduler`."""

from hxla._src.scheduler.commands import GANGS, LIVE_POLICIES, POLICIES
from hxla._src.scheduler.elastic_jobs import (
    MOST_WASTE,
    ActiveJob,
    Capability,
    ElasticJob,
    Situation,
    best_configuration,
    configuration,
    fits,
    free_devices,
    plus,
)
from hxla._src.scheduler.job_files import LiveJob, read_jobs, read_live_jobs
from hxla._src.scheduler.live_hosts import RayFleet
from hxla._src.scheduler.live_run import (
    Decided,
    Holds,
    LiveSchedule,
    Places,
    as_line,
    as_simulation,
    decided_otherwise,
    read_record,
)
from hxla._src.scheduler.policies import (
    ExecutorTime,
    Trials,
    backfill,
    learned,
    one_at_a_time,
    proposals,
    returned,
    shortest_remaining,
)
from hxla._src.scheduler.simulator import simulate
