"""What tests know of the insides of `hxla._run`."""

from hxla._run import (
    _data,
    _fastest_executors,
    _folder_owner,
    _forms_of_job,
    _hand_over,
    _host_link,
    _pipeline_watch,
    _sample_order,
    _session,
    _session_member,
    _shared_state,
)
from hxla._run._balancer import Balancer
from hxla._run._checkpoints import Checkpoints
from hxla._run._copies_bound import least_seconds
from hxla._run._counts_of_plan import pooled
from hxla._run._data_position import from_text, to_text
from hxla._run._executors_of_plan import with_executors
from hxla._run._facts_of_run import told_differences, told_of_run
from hxla._run._fastest_executors import with_fastest_executors
from hxla._run._folder_owner import FolderOwner
from hxla._run._forms_of_job import costs_of
from hxla._run._observed_steps import Observer, Trial
from hxla._run._planned_chain import with_memory
from hxla._run._runnable import check_runnable
from hxla._run._segments_of_job import gathered_bytes
from hxla._run._session_member import rehearse
from hxla._run._session_values import plans_from_table
from hxla._run._step import Stepper
