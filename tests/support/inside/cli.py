"""What tests know of the insides of `hxla._src.cli`."""

from hxla._src.cli.main import cli
