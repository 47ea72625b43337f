"""What tests know of the insides of `hxla._run`."""

from hxla._run import _data as _data
from hxla._run import _executors_of_plan as _executors_of_plan
from hxla._run import _forms_of_job as _forms_of_job
from hxla._run import _hand_over as _hand_over
from hxla._run import _host_link as _host_link
from hxla._run import _pipeline_watch as _pipeline_watch
from hxla._run import _sample_order as _sample_order
from hxla._run import _session_member as _session_member
from hxla._run import _shared_state as _shared_state
from hxla._run._balancer import Balancer as Balancer
from hxla._run._checkpoints import Checkpoints as Checkpoints
from hxla._run._copies_bound import least_seconds as least_seconds
from hxla._run._counts_of_plan import pooled as pooled
from hxla._run._data_position import from_text as from_text
from hxla._run._data_position import to_text as to_text
from hxla._run._executors_of_plan import with_executors as with_executors
from hxla._run._executors_of_plan import with_fastest_executors as with_fastest_executors
from hxla._run._forms_of_job import costs_of as costs_of
from hxla._run._planned_chain import with_memory as with_memory
from hxla._run._runnable import check_runnable as check_runnable
from hxla._run._segments_of_job import gathered_bytes as gathered_bytes
from hxla._run._session_member import rehearse as rehearse
from hxla._run._session_values import plans_from_table as plans_from_table
from hxla._run._step import Stepper as Stepper
from hxla._run._trial import Observer as Observer
from hxla._run._trial import Trial as Trial
