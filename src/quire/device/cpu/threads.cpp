#include "threads.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <memory>
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

// Waits until `holds` does, but not for longer than `kSpin`. Returns whether it does. After the first microseconds
// the core goes to whoever else wants it, between two looks.
template <class Holds> bool spin(const Holds& holds) {
    constexpr auto kAlone = std::chrono::microseconds(4);
    constexpr int kLooks = 16;  // between two looks at the clock
    const auto begun = Clock::now();
    for (auto now = begun; now < begun + kSpin; now = Clock::now()) {
        for (int i = 0; i < kLooks; i++) {
            if (holds()) return true;
            pause();
        }
        if (now > begun + kAlone) sched_yield();
    }
    return holds();
}

// A number to sleep on until somebody changes it and wakes.
class Bell {
public:
    uint32_t rung() const { return times_; }
    // Sleeps unless the bell rang since `rung` was read.
    void wait(uint32_t rung) { futex(FUTEX_WAIT_PRIVATE, rung); }
    void ring(int most) {
        times_++;
        futex(FUTEX_WAKE_PRIVATE, (uint32_t)most);
    }

private:
    void futex(int operation, uint32_t value) { syscall(SYS_futex, &times_, operation, value, nullptr, nullptr, 0); }
    std::atomic<uint32_t> times_{0};
};

constexpr size_t kApart = 128;  // bytes: two cache lines, which are fetched together

// The parts of a round that a thread takes before it takes others': round, next part, end.
class alignas(kApart) Share {
public:
    void set(uint32_t round, int begin, int end) { state_ = (uint64_t)round << 32 | (uint64_t)begin << 16 | (uint64_t)end; }
    bool empty() const {
        const uint64_t state = state_;
        return next(state) == end(state);
    }

    // Takes a part and returns it, or -1 if there is none; `task` is the part's.
    template <class Task> int take(const std::atomic<Task>& current, Task& task) {
        uint64_t state = state_;
        while (next(state) != end(state)) {
            // A round does not end before all its parts have: the task that is read is the part's if nobody else
            // took it meanwhile.
            task = current;
            if (state_.compare_exchange_weak(state, state + (1 << 16))) return next(state);
        }
        return -1;
    }

private:
    static int next(uint64_t state) { return (int)(state >> 16 & 0xffff); }
    static int end(uint64_t state) { return (int)(state & 0xffff); }
    std::atomic<uint64_t> state_{0};
};

// What a thread writes and others read. No two threads write the same cache line while they work.
struct alignas(kApart) Status {
    std::atomic<uint64_t> finished{0};  // parts, in all rounds
    std::atomic<bool> sleeps{false};
};

class Pool {
public:
    void resize(int count) {
        std::lock_guard one_at_a_time(running_);
        stopping_ = true;
        called_.ring(INT_MAX);
        for (auto& thread : helpers_) thread.join();
        helpers_.clear();
        stopping_ = false;
        shares_ = std::make_unique<Share[]>(count);
        statuses_ = std::make_unique<Status[]>(count);
        total_ = 0;
        size_ = count;
        for (int i = 1; i < count; i++) helpers_.emplace_back([this, i] { help(i); });
    }

    int size() const { return size_; }

    void run(int parts, const std::function<void(int)>& task, bool wakes) {
        if (parts <= 1 || size_ == 1) {
            for (int part = 0; part < parts; part++) task(part);
            return;
        }
        std::lock_guard one_at_a_time(running_);
        for (int done = 0; done < parts; done += kMost)
            run_some(std::min(kMost, parts - done), [&](int part) { task(done + part); }, wakes);
    }

    uint64_t wakings() const { return wakings_; }

private:
    static constexpr int kMost = 0xffff;  // parts of a round

    void run_some(int parts, const std::function<void(int)>& task, bool wakes) {
        task_ = &task;
        round_++;
        share_out(parts, wakes);
        if (wakes) wake(parts - 1);
        take_parts(0);
        total_ += parts;
        if (spin([this] { return finished(); })) return;
        caller_sleeps_ = true;
        for (uint32_t rung = done_.rung(); !finished(); rung = done_.rung()) done_.wait(rung);
        caller_sleeps_ = false;
    }

    // Neighbouring parts go to one thread. Threads that sleep get some if they are woken.
    void share_out(int parts, bool wakes) {
        takers_.clear();
        for (int i = 0; i < size_ && (int)takers_.size() < parts; i++)
            if (i == 0 || wakes || !statuses_[i].sleeps) takers_.push_back(i);
        const int count = (int)takers_.size();  // decided once: threads fall asleep meanwhile
        for (int n = 0; n < count; n++) shares_[takers_[n]].set(round_, parts * n / count, parts * (n + 1) / count);
    }

    bool finished() const {
        uint64_t sum = 0;
        for (int i = 0; i < size_; i++) sum += statuses_[i].finished;
        return sum == total_;
    }

    // Wakes helpers that sleep, at most so many.
    void wake(int most) {
        const int count = std::min<int>(most, sleeping_);
        if (count == 0) return;
        wakings_ += count;
        called_.ring(count);
    }

    // Takes a thread's own parts, then those that others have not begun.
    void take_parts(int thread) {
        const std::function<void(int)>* task = nullptr;
        for (int i = 0; i < size_; i++) {
            Share& share = shares_[(thread + i) % size_];
            if (share.empty()) continue;
            for (int part; (part = share.take(task_, task)) >= 0;) {
                (*task)(part);
                statuses_[thread].finished++;
                if (caller_sleeps_) done_.ring(1);
            }
        }
    }

    void help(int thread) {
        const auto called = [&] { return !shares_[thread].empty() || stopping_; };
        while (!stopping_) {
            take_parts(thread);
            if (spin(called)) continue;
            const uint32_t rung = called_.rung();
            statuses_[thread].sleeps = true;
            sleeping_++;
            if (!called()) called_.wait(rung);
            sleeping_--;
            statuses_[thread].sleeps = false;
        }
    }

    std::vector<std::thread> helpers_;
    std::unique_ptr<Share[]> shares_;  // the caller's, then the helpers'
    std::unique_ptr<Status[]> statuses_;
    std::atomic<int> size_{1};
    std::mutex running_;  // held by who shares work out
    std::vector<int> takers_;  // threads with parts of their own in this round
    uint32_t round_ = 0;
    uint64_t total_ = 0;  // parts of all rounds
    std::atomic<uint64_t> wakings_{0};
    // Written at a round's beginning, or when threads fall asleep.
    alignas(kApart) std::atomic<const std::function<void(int)>*> task_{nullptr};
    std::atomic<bool> caller_sleeps_{false}, stopping_{false};
    std::atomic<int> sleeping_{0};
    Bell called_, done_;
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
