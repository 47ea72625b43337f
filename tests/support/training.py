"""A job made and trained in one call, where options of both come from one table."""

import dataclasses
from typing import Any

import hxla


def train_with(model: Any, data: Any, loss: Any, optimizer: Any, **options: Any) -> hxla.Result:
    """Train with options of `hxla.Job` and of `hxla.train` together."""
    names = {field.name for field in dataclasses.fields(hxla.Job)}
    of_job = {name: options.pop(name) for name in names & options.keys()}
    return hxla.train(hxla.Job(model, data, loss, optimizer, **of_job), **options)
