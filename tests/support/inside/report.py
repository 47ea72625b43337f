"""What tests know of the insides of `hxla._src.report`."""

from hxla._src.report import lanes as _lanes
from hxla._src.report import lanes as _lanes_picture
from hxla._src.report import terminal as _waiting
from hxla._src.report.charts import Curve, band_chart, curve_chart
from hxla._src.report.history import Rebalance, RunState, run_start
from hxla._src.report.lanes import (
    COLLECTIVE,
    COMPUTATION,
    Bar,
    Lanes,
    lanes_of_timeline,
    step_picture,
    write_picture,
)
from hxla._src.report.metrics_file import FILE_NAME, MetricsWriter, read_metrics
from hxla._src.report.run_page import html_report
from hxla._src.report.run_tables import summarise
from hxla._src.report.terminal import Progress, Waiting, line
