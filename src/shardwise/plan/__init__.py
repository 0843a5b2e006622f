"""What a job will need, computed from the layouts that the engine executes."""
