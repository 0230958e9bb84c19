"""The program of a step, traced from the model: what executors run. Knows no device."""
