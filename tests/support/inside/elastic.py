"""What tests know of the insides of `hxla._elastic`."""

from hxla._elastic import _authority, _membership
from hxla._elastic._authority import advance, begin, chosen
from hxla._elastic._commits import Ledger
from hxla._elastic._kept_state import KeptState, added, differing, newest, pruned
from hxla._elastic._membership import (
    AskedBack,
    Completed,
    Copied,
    Discard,
    Exited,
    Form,
    Joined,
    Kill,
    Leave,
    LeftState,
    MembershipRules,
    Offered,
    Passed,
    Prepare,
    Prepared,
    Release,
    Save,
    Saved,
    SharesAsked,
    Stop,
    Tell,
    Told,
    Vanished,
)
