// Attention over the blocks of pools, as MLX operations.

#include "paged.h"

namespace quire {
namespace {

// Attention of a step's rows over blocks of floats.
array attend(const array& q, const array& keys, const array& values, const TableArrays& tables,
             int kv_heads, float scale, float softcap, const std::optional<array>& sinks) {
    using namespace mlx::core;
    require(q.dtype() == float32 && q.ndim() == 3, "q must be float32 [rows, heads, key_dim]");
    require(keys.dtype() == values.dtype() && keys.shape(1) == values.shape(1), "keys and values differ");
    require(keys.shape(2) == q.shape(2), "q does not fit the keys");
    PagedRows p{};
    p.heads = q.shape(1);
    p.kv_heads = kv_heads;
    p.key_dim = q.shape(2);
    p.value_dim = values.shape(2);
    p.q_dim = p.key_dim;
    p.out_dim = p.value_dim;
    p.block = keys.shape(1);
    p.blocks = Blocks::floats;
    p.storage = storage_of(keys);
    p.first_written = INT32_MAX;
    p.scale = scale;
    p.softcap = softcap;
    check_heads(p);
    std::vector<array> inputs = {q, keys, values, tables.all};
    if (sinks) inputs.push_back(astype(*sinks, float32));
    return operation("quire::attend", {Shape{q.shape(0), p.heads, p.value_dim}}, inputs,
                     [p, sizes = tables.sizes](const std::vector<array>& in, std::vector<array>& out) mutable {
        p.q = in[0].data<float>();
        p.keys = in[1].data<char>();
        p.values = in[2].data<char>();
        p.sinks = in.size() > 4 ? in[4].data<float>() : nullptr;
        p.out = out[0].data<float>();
        return [p, t = Tables(in[3].data<int32_t>(), sizes)] { attend_floats(p, t); };
    })[0];
}

// Codes, scales and biases of vectors, `[vectors, size * bits / 32]` and so on; with a codebook there
// are its levels in place of biases.
struct Codes {
    const array &codes, &scales, &offsets;
    int bits;
    bool codebook;

    Codes(const std::vector<array>& parts, int bits, bool codebook)
        : codes(parts.at(0)), scales(parts.at(1)), offsets(parts.at(2)), bits(bits), codebook(codebook) {
        using namespace mlx::core;
        require(codes.dtype() == uint32 && scales.dtype() == float16, "codes are uint32, scales float16");
        require(offsets.dtype() == (codebook ? float32 : float16), "biases are float16, levels float32");
        require(bits >= 2 && bits <= 8 && bits != 7, "codes have 2, 3, 4, 5, 6 or 8 bits");
    }
    int size() const { return (int)((int64_t)codes.shape(-1) * 32 / bits); }
};

struct CodedShape {
    int bits, size, group;
    bool codebook;
    explicit CodedShape(const Codes& c)
        : bits(c.bits), size(c.size()), group(c.codebook ? 0 : c.size() / (int)c.scales.shape(-1)),
          codebook(c.codebook) {
        require(size % 32 == 0 && group % 32 == 0, "coded vectors and groups must be multiples of 32");
        require(!codebook || bits <= 4, "codebooks are of 4 bits at most");
    }
    Coded at(const std::vector<array>& in, size_t first) const {
        const auto halves = [&](size_t i) { return (const uint16_t*)in[i].data<char>(); };
        return {in[first].data<char>(), halves(first + 1), codebook ? nullptr : halves(first + 2),
                codebook ? in[first + 2].data<float>() : nullptr, size, bits, group};
    }
};

// How blocks hold codes, as `cache.formats.base.CodedLayout` says it.
struct CodedLayout {
    int key_bits, value_bits;
    bool codebook, by_channel;
    std::optional<array> key_rotation;
    float key_rotation_scale;
    std::optional<array> value_rotation;
    float value_rotation_scale;
};

// Attention over blocks of codes: keys and values are codes, scales, and biases or levels. Where `written` holds
// arrays, row r of sequence s reads the block `own[r] + n` as written: its keys are those at place
// `places[r] + n` of `written[2 * sources[s]]`, its values of the array after that.
array attend_coded(const array& q, const CodedLayout& layout, const std::vector<array>& keys,
                   const std::vector<array>& values, int block, const TableArrays& tables,
                   const std::vector<array>& written, int kv_heads, int out_dim, float scale, float softcap,
                   const std::optional<array>& sinks) {
    using namespace mlx::core;
    require(q.dtype() == float32 && q.ndim() == 3, "q must be float32 [rows, heads, dim]");
    const Codes k(keys, layout.key_bits, layout.codebook), v(values, layout.value_bits, layout.codebook);
    const CodedShape k_shape(k), v_shape(v);
    PagedRows p{};
    p.heads = q.shape(1);
    p.kv_heads = kv_heads;
    p.q_dim = q.shape(2);
    p.key_dim = layout.by_channel ? p.q_dim : k_shape.size;
    p.value_dim = v_shape.size;
    p.out_dim = out_dim;
    p.block = block;
    p.blocks = layout.by_channel ? Blocks::channels : Blocks::tokens;
    p.storage = Storage::float32;
    p.first_written = INT32_MAX;
    p.scale = scale;
    p.softcap = softcap;
    require(!layout.by_channel || k_shape.size == p.block, "a channel is as long as a block");
    require(p.q_dim <= p.key_dim && out_dim <= p.value_dim && p.q_dim % 16 == 0 && out_dim % 16 == 0,
            "q does not fit the keys, or outputs the values");
    check_heads(p);
    require(tables.tails() == !written.empty(), "written blocks and their tables belong together");
    for (const array& each : written) require(each.dtype() == float32, "written blocks must be float32");
    require(written.empty() || written[1].shape(-1) == out_dim, "written values must be as long as outputs");
    std::vector<array> inputs;
    inputs.reserve(11 + written.size());
    for (const array* each : {&q, &tables.all, &k.codes, &k.scales, &k.offsets, &v.codes, &v.scales, &v.offsets})
        inputs.push_back(*each);
    const size_t written_at = inputs.size();
    inputs.insert(inputs.end(), written.begin(), written.end());
    const VectorRotationShape key_rotation(layout.key_rotation, layout.key_rotation_scale, p.key_dim, inputs);
    const VectorRotationShape value_rotation(layout.value_rotation, layout.value_rotation_scale, p.value_dim, inputs);
    const size_t sinks_at = sinks ? inputs.size() : 0, written_count = written.size();
    if (sinks) inputs.push_back(astype(*sinks, float32));
    return operation("quire::attend_coded", {Shape{q.shape(0), p.heads, out_dim}}, inputs,
                     [=, sizes = tables.sizes](const std::vector<array>& in, std::vector<array>& out) mutable {
        p.q = in[0].data<float>();
        p.coded_keys = k_shape.at(in, 2);
        p.coded_values = v_shape.at(in, 5);
        p.key_rotation = key_rotation.at(in);
        p.value_rotation = value_rotation.at(in);
        p.sinks = sinks_at ? in[sinks_at].data<float>() : nullptr;
        p.out = out[0].data<float>();
        std::vector<const float*> sources;
        for (size_t i = 0; i < written_count; i++) sources.push_back(in[written_at + i].data<float>());
        return [p, t = Tables(in[1].data<int32_t>(), sizes), sources] {
            // Rows that are read together have one own block, from which on blocks are as written.
            const auto ends = [&](int, int64_t row) { return t.own && t.own[row] != t.own[row - 1]; };
            const auto tasks = tasks_of(t, p.kv_heads, ends);
            parallel((int)tasks.size(), [&](int number) {
                const Task& task = tasks[number];
                const int s = task.sequence;
                PagedRows part = p;
                part.table = t.table + t.starts[s] - t.blocks[s];
                part.first = t.first;
                part.last = t.last;
                if (t.own) {
                    part.written_keys = sources[2 * t.sources[s]];
                    part.written_values = sources[2 * t.sources[s] + 1];
                    part.first_written = t.own[task.begin];
                    part.written_place = t.places[task.begin];
                }
                kernels().attend(part, task.kv_head, task.begin, task.end,
                                 scratch(kernels().attend_scratch_floats(part)));
            }, worth_waking(p, t));
        };
    })[0];
}

}  // namespace

void bind_attention(nb::module_& m) {
    nb::class_<TableArrays>(m, "Tables").def(nb::init<const array&, const std::vector<int64_t>&>(), nb::arg("all"),
                                             nb::arg("sizes"));
    m.def("attend", &attend, nb::arg("q"), nb::arg("keys"), nb::arg("values"), nb::arg("tables"),
          nb::arg("kv_heads"), nb::arg("scale"), nb::arg("softcap") = 0.0f,
          nb::arg("sinks").none() = nb::none());
    using Map = std::optional<array>;
    nb::class_<CodedLayout>(m, "CodedLayout")
        .def(nb::init<int, int, bool, bool, Map, float, Map, float>(), nb::arg("key_bits"), nb::arg("value_bits"),
             nb::arg("codebook"), nb::arg("by_channel"), nb::arg("key_rotation").none(), nb::arg("key_rotation_scale"),
             nb::arg("value_rotation").none(), nb::arg("value_rotation_scale"));
    m.def("attend_coded", &attend_coded, nb::arg("q"), nb::arg("layout"), nb::arg("keys"), nb::arg("values"),
          nb::arg("block_size"), nb::arg("tables"), nb::arg("written"), nb::arg("kv_heads"),
          nb::arg("value_dim"), nb::arg("scale"), nb::arg("softcap") = 0.0f,
          nb::arg("sinks").none() = nb::none());
}

}  // namespace quire
