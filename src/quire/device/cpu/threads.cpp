#include "threads.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread looks for work before it sleeps. Within a step the next work is a few microseconds away, and
// waking a thread takes longer than most of it; between two steps threads sleep.
constexpr auto kSpin = std::chrono::microseconds(50);

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits until `holds` does, but not for longer than `kSpin`. Returns whether it does.
template <class Holds> bool spin(const Holds& holds) {
    constexpr int kLooks = 16;  // between two looks at the clock
    const auto end = Clock::now() + kSpin;
    do {
        for (int i = 0; i < kLooks; i++) {
            if (holds()) return true;
            pause();
        }
    } while (Clock::now() < end);
    return holds();
}

class Pool {
public:
    void resize(int count) {
        std::lock_guard one_at_a_time(running_);
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
            work_.notify_all();
        }
        for (auto& thread : helpers_) thread.join();
        helpers_.clear();
        stopping_ = false;
        for (int i = 1; i < count; i++) helpers_.emplace_back([this] { help(); });
        size_ = count;
    }

    int size() const { return size_; }

    void run(int parts, const std::function<void(int)>& task, bool wakes) {
        if (parts <= 1 || size_ == 1) {
            for (int part = 0; part < parts; part++) task(part);
            return;
        }
        std::lock_guard one_at_a_time(running_);
        task_ = &task;
        unfinished_ = parts;
        round_++;
        left_ = (uint64_t)round_ << 32 | (uint32_t)parts;
        if (wakes) wake(parts - 1);
        take_parts();
        // Helpers that have taken no part are not waited for.
        const auto finished = [this] { return unfinished_ == 0; };
        if (spin(finished)) return;
        std::unique_lock lock(mutex_);
        caller_sleeps_ = true;
        done_.wait(lock, finished);
        caller_sleeps_ = false;
    }

    uint64_t wakings() const { return wakings_; }

private:
    // Wakes helpers that sleep, at most so many.
    void wake(int most) {
        if (sleeping_ == 0) return;
        std::lock_guard lock(mutex_);
        const int count = std::min<int>(most, sleeping_);
        wakings_ += count;
        for (int i = 0; i < count; i++) work_.notify_one();
    }

    // Takes parts while there are any. A part can only be taken in the round that it belongs to, and a round does not
    // end before all its parts have, so the task that was read is the part's.
    void take_parts() {
        uint64_t left = left_;
        while ((uint32_t)left != 0) {
            const auto* task = task_.load();
            if (!left_.compare_exchange_weak(left, left - 1)) continue;
            (*task)((int)(uint32_t)left - 1);
            if (--unfinished_ == 0 && caller_sleeps_) {
                std::lock_guard lock(mutex_);
                done_.notify_one();
            }
            left = left_;
        }
    }

    void help() {
        const auto called = [this] { return (uint32_t)left_.load() != 0 || stopping_; };
        while (!stopping_) {
            take_parts();
            if (spin(called)) continue;
            std::unique_lock lock(mutex_);
            sleeping_++;
            work_.wait(lock, called);
            sleeping_--;
        }
    }

    std::vector<std::thread> helpers_;
    std::atomic<int> size_{1};
    std::mutex running_;  // held by who shares work out
    std::mutex mutex_;    // held to fall asleep and to wake
    std::condition_variable work_, done_;
    std::atomic<const std::function<void(int)>*> task_{nullptr};
    std::atomic<uint64_t> left_{0};  // the round, and how many of its parts nobody has taken
    std::atomic<int> unfinished_{0}, sleeping_{0};
    std::atomic<bool> caller_sleeps_{false}, stopping_{false};
    std::atomic<uint64_t> wakings_{0};
    uint32_t round_ = 0;
};

Pool& pool() {
    static Pool* one = new Pool;  // never destroyed: its threads may outlive static objects
    return *one;
}

}  // namespace

void parallel(int parts, const std::function<void(int)>& run, bool wakes) { pool().run(parts, run, wakes); }
void set_threads(int count) { pool().resize(count < 1 ? 1 : count); }
int threads() { return pool().size(); }
uint64_t wakings() { return pool().wakings(); }

}  // namespace quire
