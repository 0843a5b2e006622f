"""`shardwise report RUN`: one HTML file of what a run promised and did. `page` puts it together
from `charts` and the tables here, `command` is the command line. What it shows comes from the files
of the run directory, as `doctor.run.case` reads them.
"""
