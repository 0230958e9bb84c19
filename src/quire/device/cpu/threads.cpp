#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {
namespace {

class Pool {
public:
    ~Pool() { resize(1); }

    void resize(int count) {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
            work_.notify_all();
        }
        for (auto& thread : helpers_) thread.join();
        helpers_.clear();
        stopping_ = false;
        for (int i = 1; i < count; i++) helpers_.emplace_back([this, seen = round_] { help(seen); });
    }

    int size() const { return (int)helpers_.size() + 1; }

    void run(int parts, const std::function<void(int)>& task) {
        std::lock_guard one_at_a_time(running_);
        if (helpers_.empty() || parts <= 1) {
            for (int part = 0; part < parts; part++) task(part);
            return;
        }
        {
            std::lock_guard lock(mutex_);
            task_ = &task;
            parts_ = parts;
            next_ = 0;
            busy_ = (int)helpers_.size();
            round_++;
            work_.notify_all();
        }
        take_parts(task, parts);
        std::unique_lock lock(mutex_);
        done_.wait(lock, [this] { return busy_ == 0; });
    }

private:
    void take_parts(const std::function<void(int)>& task, int parts) {
        for (int part = next_++; part < parts; part = next_++) task(part);
    }

    void help(unsigned seen) {
        std::unique_lock lock(mutex_);
        while (true) {
            work_.wait(lock, [&] { return stopping_ || round_ != seen; });
            if (stopping_) return;
            seen = round_;
            const auto* task = task_;
            const int parts = parts_;
            lock.unlock();
            take_parts(*task, parts);
            lock.lock();
            if (--busy_ == 0) done_.notify_one();
        }
    }

    std::vector<std::thread> helpers_;
    std::mutex running_;  // held by who shares work out
    std::mutex mutex_;    // of what follows
    std::condition_variable work_, done_;
    const std::function<void(int)>* task_ = nullptr;
    std::atomic<int> next_{0};
    int parts_ = 0, busy_ = 0;
    unsigned round_ = 0;
    bool stopping_ = false;
};

Pool& pool() {
    static Pool* one = new Pool;  // never destroyed: its threads may outlive static objects
    return *one;
}

}  // namespace

void parallel(int parts, const std::function<void(int)>& run) { pool().run(parts, run); }
void set_threads(int count) { pool().resize(count < 1 ? 1 : count); }
int threads() { return pool().size(); }

}  // namespace quire
