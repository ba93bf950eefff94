"""``python -m asymcheck_lab`` is the command ``asymlab``."""

from asymcheck_lab.cli import app

app(prog_name="asymlab")
