"""What tests know of the insides of `hxla._src.session`."""

from hxla._src.session import bits as _bits_runs
from hxla._src.session import member as _session_member
from hxla._src.session import opening as _opening
from hxla._src.session import running_plan as _running_plan
from hxla._src.session import step as _step
from hxla._src.session import watch as _pipeline_watch
from hxla._src.session.bits import EquationRuns
from hxla._src.session.ending import LEAVE, SAVE, STOP, Requests
from hxla._src.session.measure import ObservedSteps, Observer, in_training, measured_links
from hxla._src.session.member import rehearse
from hxla._src.session.opening import check_runnable, with_fastest_executors
from hxla._src.session.running_plan import Balancer
from hxla._src.session.saved_state import told_differences, told_of_run
from hxla._src.session.step import Stepper
from hxla._src.session.values import plans_from_table
from hxla._src.session.watch import PredictedStep, times_as_text, times_from_texts
from hxla._src.session.watch import _in_words as pipeline_in_words
