"""Runs pod specs as local processes: the ground under `headway up` and the test plane's node agent."""
