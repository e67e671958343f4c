"""`headway`, also installed as `kubectl headway`: up, replay, status."""
