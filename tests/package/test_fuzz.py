"""Some of what `make fuzz` tries, and that it would see what is wrong."""

import json

import hxla
from support import fuzz


def test_damaged_files_are_refused_in_words_or_read():
    found = fuzz.run(120, seed=16)
    assert len(found) == 120
    wrong = [i for i in found if i.outcome in ("failed", "hung")]
    assert not wrong, "\n".join(f"{i.kind}, {i.how}: {i.words}" for i in wrong)
    assert max(i.mebibytes for i in found) < fuzz.MOST_MEBIBYTES
    assert {i.outcome for i in found} == {"accepted", "refused"}


def test_an_input_depends_on_the_seed_and_its_number_alone(tmp_path):
    from support.fuzz_kinds import kinds

    plan = kinds()["plan"]
    texts = []
    for name in ("a", "b"):
        fuzz.write(tmp_path / name, plan, fuzz.random.Random("16 5"))
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1] != plan.text
    assert hxla.Plan.from_json(plan.text).batch_size == json.loads(plan.text)["batch_size"]
