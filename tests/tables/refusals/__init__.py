"""Tables of what is taken and what is refused, a module for each package (see ``row.py``)."""
