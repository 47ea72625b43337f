"""What tests know of the insides of `hxla._src.checkpoint`."""

from hxla._src.checkpoint import checkpoints as _folder_owner
from hxla._src.checkpoint import hand_over as _hand_over
from hxla._src.checkpoint.checkpoints import Checkpoints, FolderOwner
