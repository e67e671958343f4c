"""Decisions about limits: what was observed becomes what should be in force, with a reason."""
