"""The Headway engine: continuous batching under live limits, for any transformers causal LM."""
