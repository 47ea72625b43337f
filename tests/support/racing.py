"""The scatters of a program whose result depends on the order of its updates."""

import re

_SCATTER = r'"stablehlo\.scatter"\(.*?unique_indices = (\w+)\}> \(\{ \^bb0\(%\w+: tensor<(\w+)>'


def racing_scatters(text):
    """How many scatters of floats of a lowered program may meet; pools are such, too."""
    text = " ".join(text.split())
    kinds = re.findall(_SCATTER, text)
    meeting = [kind for is_unique, kind in kinds if is_unique == "false" and "f" in kind]
    return len(meeting) + text.count("stablehlo.select_and_scatter")
