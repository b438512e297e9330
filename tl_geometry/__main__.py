"""``python -m tl_geometry``: the command line."""

from tl_geometry.cli import main

main()
