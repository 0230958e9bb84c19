// Instructions of segments that write keys and values to pools, and attend to them.

#include "segment_run.h"

namespace quire {
namespace {

// Vectors of floats as elements of a pool.
void store_as(Storage storage, const float* from, int64_t count, char* to) {
    if (storage == Storage::float32) {
        std::memcpy(to, from, count * 4);
    } else if (storage == Storage::bfloat16) {
        for (int64_t i = 0; i < count; i++) ((mlx::core::bfloat16_t*)to)[i] = from[i];
    } else {
        for (int64_t i = 0; i < count; i++) ((mlx::core::float16_t*)to)[i] = from[i];
    }
}

// Writes the keys or values of rows to a pool.
class WriteRows : public RowInstruction {
public:
    WriteRows(int x, int pool, int group, int64_t heads, int64_t width)
        : RowInstruction({x}, {}, 4 * width), pool_(pool), group_(group), heads_(heads) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        const PoolArray& pool = frame.pools.at(pool_);
        const Tables& t = frame.groups.at(group_);
        const float* from = frame.values[reads[0]];
        const int64_t bytes = pool.storage == Storage::float32 ? 4 : 2;
        int sequence = 0;
        for (int64_t row = begin; row < end; row++) {
            while (row >= t.rows[sequence + 1]) sequence++;
            const int64_t key = frame.keys[row];
            const int64_t block = t.table[t.starts[sequence] + key / pool.block - t.blocks[sequence]];
            for (int64_t head = 0; head < heads_; head++) {
                const int64_t place = (block * heads_ + head) * pool.block + key % pool.block;
                store_as(pool.storage, from + (row * heads_ + head) * pool.dim, pool.dim,
                         pool.data + place * pool.dim * bytes);
            }
        }
    }

private:
    int pool_, group_;
    int64_t heads_;
};

class AttendRows : public Instruction {
public:
    AttendRows(int q, std::optional<int> sinks, int out, int keys, int values, int group, int heads, int kv_heads,
               float scale, float softcap)
        : Instruction(sinks ? std::vector<int>{q, *sinks} : std::vector<int>{q}, {out}), keys_(keys), values_(values),
          group_(group), heads_(heads), kv_heads_(kv_heads), scale_(scale), softcap_(softcap) {}

    void run(Frame& frame) const override {
        const PoolArray &keys = frame.pools.at(keys_), &values = frame.pools.at(values_);
        PagedRows p{};
        p.q = frame.values[reads[0]];
        p.out = frame.values[writes[0]];
        p.heads = heads_;
        p.kv_heads = kv_heads_;
        p.key_dim = p.q_dim = keys.dim;
        p.value_dim = p.out_dim = values.dim;
        p.block = keys.block;
        p.blocks = Blocks::floats;
        p.storage = keys.storage;
        p.keys = keys.data;
        p.values = values.data;
        p.first_written = INT32_MAX;
        p.scale = scale_;
        p.softcap = softcap_;
        p.sinks = reads.size() > 1 ? frame.values[reads[1]] : nullptr;
        attend_floats(p, frame.groups.at(group_));
    }
    int64_t work(const Frame& frame) const override {
        const int dims = frame.pools.at(keys_).dim + frame.pools.at(values_).dim;
        return pairs_of(frame.groups.at(group_)) * heads_ * dims;
    }
    const char* kind() const override { return "attention"; }

private:
    int keys_, values_, group_, heads_, kv_heads_;
    float scale_, softcap_;
};

}  // namespace

void bind_segment_attention(SegmentClass& segment) {
    using MaybeValue = std::optional<int>;
    segment
        .def("write", [](Segment& s, int x, int pool, int group, int64_t heads) {
            s.add<WriteRows>(x, pool, group, heads, s.body->width(x));
        }, nb::arg("x"), nb::arg("pool"), nb::arg("group"), nb::arg("heads"))
        .def("attend", [](Segment& s, int q, MaybeValue sinks, int out, int keys, int values, int group, int heads,
                          int kv_heads, float scale, float softcap) {
            s.add<AttendRows>(q, sinks, out, keys, values, group, heads, kv_heads, scale, softcap);
        }, nb::arg("q"), nb::arg("sinks").none(), nb::arg("out"), nb::arg("keys"), nb::arg("values"),
             nb::arg("group"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("scale"), nb::arg("softcap"));
}

}  // namespace quire
