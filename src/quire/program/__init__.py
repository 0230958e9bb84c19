"""Programs of steps, traced from the model, which executors run. Knows no device."""
