// What operations of attention share: the tables of a step, and how its rows are divided among threads.
#pragma once

#include "operation.h"

namespace quire {

// The type of a pool of floats.
inline Storage storage_of(const array& pool) {
    using namespace mlx::core;
    if (pool.dtype() == bfloat16) return Storage::bfloat16;
    if (pool.dtype() == float16) return Storage::float16;
    require(pool.dtype() == float32, "blocks must hold floats");
    return Storage::float32;
}

// The arrays of `attention.metadata`, end to end in one: block table, its starts, first blocks, query starts,
// first and last visible keys. With tails also, of each row, its own block, from which on it reads blocks as
// written; of each sequence, the source of these; of each row, the place of its own block there.
struct TableArrays {
    array all;
    std::vector<int64_t> sizes;

    TableArrays(const array& all, const std::vector<int64_t>& sizes) : all(all), sizes(sizes) {
        int64_t total = 0;
        for (int64_t size : sizes) total += size;
        require(sizes.size() == 6 || sizes.size() == 9, "there are six tables, or nine with tails");
        require(all.dtype() == mlx::core::int32 && (int64_t)all.size() == total, "tables must be int32, end to end");
    }
    bool tails() const { return sizes.size() == 9; }
};

// The same as a task reads them.
struct Tables {
    const int32_t *table, *starts, *blocks, *rows, *first, *last;
    const int32_t *own = nullptr, *sources = nullptr, *places = nullptr;  // with tails
    int sequences;
    Tables(const int32_t* all, const std::vector<int64_t>& sizes) : sequences((int)sizes[3] - 1) {
        const int32_t** parts[] = {&table, &starts, &blocks, &rows, &first, &last, &own, &sources, &places};
        for (size_t i = 0; i < sizes.size(); i++) {
            *parts[i] = all;
            all += sizes[i];
        }
    }
};

// Rows of one sequence that are attended together, for one KV head.
struct Task {
    int sequence, kv_head;
    int64_t begin, end;
};

// The most rows of a task: as many as threads need to share out the step evenly, but no more than 16.
inline int64_t task_rows(const Tables& t, int kv_heads) {
    constexpr int64_t kMost = 16;
    if (threads() == 1) return kMost;
    const int64_t rows = t.rows[t.sequences] - t.rows[0];
    return std::clamp<int64_t>(rows * kv_heads / (2 * threads()), 1, kMost);
}

// Cuts rows where `ends` says, and after `task_rows`.
template <class Ends> std::vector<Task> tasks_of(const Tables& t, int kv_heads, const Ends& ends) {
    const int64_t most = task_rows(t, kv_heads);
    std::vector<Task> tasks;
    for (int s = 0; s < t.sequences; s++) {
        for (int64_t row = t.rows[s]; row < t.rows[s + 1];) {
            int64_t end = row + 1;
            while (end < t.rows[s + 1] && end - row < most && !ends(s, end)) end++;
            for (int head = 0; head < kv_heads; head++) tasks.push_back({s, head, row, end});
            row = end;
        }
    }
    return tasks;
}

// The pairs of a step's rows and the keys that they see.
inline int64_t pairs_of(const Tables& t) {
    int64_t pairs = 0;
    for (int64_t row = t.rows[0]; row < t.rows[t.sequences]; row++) pairs += t.last[row] - t.first[row] + 1;
    return pairs;
}

// Whether the attention of a step's rows is worth waking threads.
inline bool worth_waking(const PagedRows& p, const Tables& t) {
    return quire::worth_waking(pairs_of(t) * p.heads * (p.key_dim + p.value_dim), kLeastWork);
}

inline void check_heads(const PagedRows& p) {
    require(p.heads % p.kv_heads == 0, "the heads are no multiple of the KV heads");
    require(p.key_dim % 16 == 0 && p.value_dim % 16 == 0 && p.block % 16 == 0,
            "head sizes and blocks must be multiples of 16");
}

// Attention of a step's rows over blocks of floats. `p`: but for the tables.
inline void attend_floats(const PagedRows& p, const Tables& t) {
    const auto tasks = tasks_of(t, p.kv_heads, [](int, int64_t) { return false; });
    parallel((int)tasks.size(), [&](int number) {
        const Task& task = tasks[number];
        PagedRows part = p;
        part.table = t.table + t.starts[task.sequence] - t.blocks[task.sequence];
        part.first = t.first;
        part.last = t.last;
        kernels().attend(part, task.kv_head, task.begin, task.end, scratch(kernels().attend_scratch_floats(part)));
    }, worth_waking(p, t));
}

}  // namespace quire
