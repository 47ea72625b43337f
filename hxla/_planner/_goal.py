"""What the searches of all chains share."""

import dataclasses
import math


@dataclasses.dataclass
class Goal:
    """Of a search over several chains.

    Attributes:
        good_enough: Gap at which the search may end.
        fastest: Seconds of the best plan known, as far as bounds know what a plan costs.
        placed: Seconds of the best plan on its devices.
    """

    good_enough: float
    fastest: float = math.inf
    placed: float = math.inf

    @property
    def worthwhile(self) -> float:
        """A plan that is no faster than this need not be found."""
        return self.fastest / (1 + self.good_enough)
