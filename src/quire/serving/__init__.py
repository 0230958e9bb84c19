"""The HTTP side without HTTP: prompts, constraints, submission, streams of events."""
