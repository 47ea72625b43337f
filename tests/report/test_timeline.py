"""Pictures and traces show what was replayed."""

import json
import xml.etree.ElementTree as ET

from support.inside.report import lanes_of_timeline, step_picture, write_picture
from support.inside.schedule import interleaved, one_f_one_b, perfetto
from support.overlapped_replay import replay

TIMELINE = replay(one_f_one_b(3, 4), [1.0, 2.0, 1.0], [2.0, 4.0, 2.0], send_seconds_P=[0.5, 0.5])


def test_a_trace_has_every_event_on_its_stage():
    records = json.loads(perfetto(TIMELINE, ["a", "b", "c"]))["traceEvents"]
    tracks = {r["tid"]: r["args"]["name"] for r in records if r["name"] == "thread_name"}
    events = [r for r in records if r["ph"] == "X"]
    assert set(tracks.values()) == {"a", "b", "c", "a: sends", "b: sends", "c: sends"}
    assert len(events) == len(TIMELINE.events) + len(TIMELINE.sends)
    busy = sum(r["dur"] for r in events if tracks[r["tid"]] == "b") / 1e6
    assert busy == TIMELINE.busy_seconds[1] == 24.0
    assert max(r["ts"] + r["dur"] for r in events) == TIMELINE.makespan_seconds * 1e6


def test_a_picture_numbers_every_microbatch(tmp_path):
    path = tmp_path / "timeline.svg"
    lanes = lanes_of_timeline(TIMELINE, title="a title", end_seconds=TIMELINE.makespan_seconds + 5)
    write_picture(lanes, path)
    texts = [e.text for e in ET.fromstring(path.read_text()).iter() if e.tag.endswith("text")]
    # Forward and backward on each of the 3 stages.
    assert all(texts.count(str(m)) == 6 for m in range(4))
    assert {"a title", "stage 2", "send"} <= set(texts)
    before = path.read_bytes()
    write_picture(lanes, path)
    assert path.read_bytes() == before


def test_a_picture_tells_chunks_apart():
    timeline = replay(interleaved(2, 4, 2), [1.0] * 4, [2.0] * 4)
    drawn = step_picture([lanes_of_timeline(timeline, ["x", "y"], title="")])
    for chunk in range(2):
        own = [e for e in timeline.events if e.chunk == chunk]
        assert drawn.count(f' chunk{chunk}"') == len(own)
