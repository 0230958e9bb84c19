// Threads that share a kernel's work. While there is none they look for some for microseconds, and then sleep: a
// thread that spins takes the core from the process that serves HTTP.
#pragma once

#include <cstdint>
#include <functional>

namespace quire {

// Calls `run(part)` for each part in [0, parts), on as many threads as `set_threads` allows, the
// caller's among them. Returns when all are done. Calls from several threads take turns.
//
// `wakes`: whether the work is worth waking threads that sleep; those that are awake help anyway.
void parallel(int parts, const std::function<void(int)>& run, bool wakes = true);

void set_threads(int count);
int threads();

// How often a thread that slept was woken so far.
uint64_t wakings();

}  // namespace quire
