"""The Headway controller: kopf at the edge, pure decisions inside."""
