// The kernels as MLX operations: custom primitives that run on MLX's CPU stream, and their Python face.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "threads.h"

namespace nb = nanobind;
using mlx::core::array;

namespace quire {
namespace {

const Kernels* chosen = nullptr;

const Kernels& kernels() { return *chosen; }

bool use(const std::string& name) {
    const Kernels* all[] = {amx_kernels(), vnni_kernels(), avx512_kernels(), avx2_kernels(), baseline_kernels()};
    for (const Kernels* each : all) {
        if (each && (name.empty() || name == each->name)) {
            chosen = each;
            return true;
        }
    }
    return false;
}

// Memory that a kernel needs while it runs, kept by its thread for the next one.
float* scratch(int64_t floats) {
    thread_local std::vector<float> kept;
    if ((int64_t)kept.size() < floats) kept.resize(floats);
    return kept.data();
}

// Arranged rows: apart from `scratch`, which a kernel takes meanwhile.
float* scratch_rows(int64_t floats) {
    thread_local std::vector<float> kept;
    if ((int64_t)kept.size() < floats) kept.resize(floats);
    return kept.data();
}

// A task that writes a view row by row.
auto copying(const array& from, array& to) {
    return [shape = from.shape(), strides = from.strides(), size = (int64_t)from.itemsize(),
            source = from.data<char>(), target = to.data<char>(), count = (int64_t)from.size()] {
        const int axes = (int)shape.size();
        std::vector<int> place(axes, 0);
        int64_t offset = 0;
        for (int64_t i = 0; i < count; i++) {
            std::memcpy(target + i * size, source + offset * size, size);
            for (int axis = axes - 1; axis >= 0; axis--) {
                offset += strides[axis];
                if (++place[axis] < shape[axis]) break;
                offset -= strides[axis] * shape[axis];
                place[axis] = 0;
            }
        }
    };
}

// A view's elements row by row.
array copied(const array& from, mlx::core::cpu::CommandEncoder& encoder) {
    array to(from.shape(), from.dtype(), nullptr, {});
    to.set_data(mlx::core::allocator::malloc(to.nbytes()));
    encoder.dispatch(copying(from, to));
    encoder.add_temporary(to);
    return to;
}

// An operation whose task is made from its inputs and its outputs, all of them floats.
template <class Make> class Operation : public mlx::core::Primitive {
public:
    Operation(mlx::core::Stream stream, const char* name, Make make)
        : Primitive(stream), name_(name), make_(std::move(make)) {}

    void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
        for (array& out : outputs) out.set_data(mlx::core::allocator::malloc(out.nbytes()));
        auto& encoder = mlx::core::cpu::get_command_encoder(stream());
        std::vector<array> rows = inputs;  // that lie row by row
        for (array& input : rows) {
            if (!input.flags().row_contiguous) input = copied(input, encoder);
        }
        encoder.dispatch(make_(rows, outputs));
    }
    void eval_gpu(const std::vector<array>&, std::vector<array>&) override {
        throw std::runtime_error("quire's CPU kernels do not run on a GPU");
    }
    const char* name() const override { return name_; }

private:
    const char* name_;
    Make make_;
};

template <class Make>
std::vector<array> operation(const char* name, std::vector<mlx::core::Shape> shapes,
                             std::vector<array> inputs, Make make) {
    const auto stream = mlx::core::default_stream(mlx::core::Device(mlx::core::Device::cpu));
    std::shared_ptr<mlx::core::Primitive> primitive =
        std::make_shared<Operation<Make>>(stream, name, std::move(make));
    const std::vector<mlx::core::Dtype> types(shapes.size(), mlx::core::float32);
    return array::make_arrays(std::move(shapes), types, primitive, inputs);
}

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

// Parts of about equal size into which `count` items are cut, none smaller than `least`.
int parts_of(int64_t count, int64_t least) {
    const int64_t most = (int64_t)threads() * (threads() > 1 ? 3 : 1);
    return (int)std::max<int64_t>(1, std::min(most, count / std::max<int64_t>(least, 1)));
}

template <class Run> void split(int64_t count, int64_t least, int64_t multiple, const Run& run) {
    const int parts = parts_of(count, least);
    const int64_t each = ((count + parts - 1) / parts + multiple - 1) / multiple * multiple;
    parallel(parts, [&](int part) {
        const int64_t begin = part * each, end = std::min(count, begin + each);
        if (begin < end) run(begin, end);
    });
}

constexpr int64_t kLeastWork = 1 << 16;  // multiplications that are worth waking a thread for

constexpr int64_t kColumnsMultiple = 96;  // of columns that are multiplied apart: whole tiles of any kernel

void multiply(const Weight& w, const Source& x, int64_t count, float* y) {
    const Kernels& k = kernels();
    float* arranged = scratch_rows(k.arranged_floats(w, count));
    split(count, kLeastWork / w.depth + 1, kRowsMultiple, [&](int64_t begin, int64_t end) {
        k.arrange(w, x, begin, end, arranged);
    });
    const Rows rows{count, arranged, y, nullptr, w.columns};
    split(w.columns, kLeastWork / (w.depth * count) + 1, kColumnsMultiple, [&](int64_t begin, int64_t end) {
        k.product(w, rows, begin, end, scratch(k.scratch_floats(w)));
    });
}

Storage storage_of(const std::string& mode) {
    if (mode == "affine") return Storage::affine;
    if (mode == "mxfp4") return Storage::mxfp4;
    if (mode == "mxfp8") return Storage::mxfp8;
    if (mode == "nvfp4") return Storage::nvfp4;
    throw std::invalid_argument("no packing is called " + mode);
}

// Where the tensors of a packed weight are among an operation's inputs, and what they hold.
struct Tensors {
    Storage storage;
    int bits, group;
    bool has_biases, has_offsets;
    int64_t columns, depth;

    // `expert`: which matrix of a stack.
    Weight weight(const std::vector<array>& in, int64_t expert = 0) const {
        Weight w{storage, bits, group, columns, depth, nullptr, nullptr, nullptr, nullptr};
        size_t at = 1;
        const auto part = [&](int64_t bytes) {
            return (const char*)in[at++].data<char>() + expert * bytes;
        };
        const int64_t width = storage == Storage::float32 ? 32 : storage == Storage::bfloat16 ? 16 : bits;
        w.values = part(columns * depth * width / 8);
        if (group) {
            const int64_t groups = columns * (depth / group);
            w.scales = part(groups * (storage == Storage::affine ? 4 : 1));
            if (has_biases) w.biases = (const float*)part(groups * 4);
        }
        if (has_offsets) w.offsets = (const float*)part(columns * 4);
        return w;
    }
};

struct Operands {
    std::vector<array> arrays;
    Tensors tensors;
};

Operands operands(const array& x, const array& weight, const std::optional<array>& scales,
                  const std::optional<array>& biases, const std::optional<array>& offsets, int group,
                  int bits, const std::string& mode) {
    using namespace mlx::core;
    require(x.dtype() == float32 && x.ndim() >= 1, "x must be float32");
    Operands o{{x, weight}, {}};
    Tensors& t = o.tensors;
    t.columns = weight.shape(-2);
    t.depth = x.shape(-1);
    t.bits = t.group = 0;
    if (scales) {
        t.storage = storage_of(mode);
        t.bits = bits;
        t.group = group;
        require(weight.dtype() == uint32 && (int64_t)weight.shape(-1) * 32 == t.depth * bits,
                "codes must be uint32 and as deep as x");
        require((int64_t)scales->shape(-1) * group == t.depth, "scales must be as deep as x");
        require(scales->dtype() == (t.storage == Storage::affine ? float32 : uint8),
                "scales have the wrong type");
        o.arrays.push_back(*scales);
        t.has_biases = t.storage == Storage::affine;
        require(t.has_biases == biases.has_value(), "affine codes have biases, others none");
        if (biases) {
            require(biases->dtype() == float32, "biases must be float32");
            o.arrays.push_back(*biases);
        }
    } else {
        require(weight.shape(-1) == t.depth, "the weight must be as deep as x");
        require(weight.dtype() == float32 || weight.dtype() == bfloat16,
                "the weight must be float32 or bfloat16");
        t.storage = weight.dtype() == float32 ? Storage::float32 : Storage::bfloat16;
        t.has_biases = false;
    }
    t.has_offsets = offsets.has_value();
    if (offsets) {
        require(offsets->dtype() == float32 && offsets->shape(-1) == t.columns,
                "the bias must be float32, one a column");
        o.arrays.push_back(*offsets);
    }
    return o;
}

array product(const array& x, const array& weight, const std::optional<array>& scales,
              const std::optional<array>& biases, const std::optional<array>& offsets, int group,
              int bits, const std::string& mode) {
    Operands o = operands(x, weight, scales, biases, offsets, group, bits, mode);
    require(weight.ndim() == 2, "the weight must be a matrix");
    auto shape = x.shape();
    shape.back() = (int)o.tensors.columns;
    return operation("quire::product", {shape}, o.arrays,
                     [t = o.tensors](const std::vector<array>& in, std::vector<array>& out) {
        const Weight w = t.weight(in);
        return [w, x = in[0].data<float>(), y = out[0].data<float>(), count = (int64_t)in[0].size() / t.depth] {
            multiply(w, Source{x, w.depth, nullptr}, count, y);
        };
    })[0];
}

// Products with experts: row i of x with the matrix `experts[i]` of a stack `[experts, columns, ...]`.
array expert_product(const array& x, const array& experts, const array& weight,
                     const std::optional<array>& scales, const std::optional<array>& biases,
                     const std::optional<array>& offsets, int group, int bits, const std::string& mode) {
    using namespace mlx::core;
    Operands o = operands(x, weight, scales, biases, offsets, group, bits, mode);
    require(weight.ndim() == 3, "the weights must be a stack of matrices");
    require(experts.ndim() == 2, "experts must be [rows, k]");
    const int64_t k = experts.shape(1), pairs = experts.size();
    const bool shared = x.ndim() == 2;  // the k experts of a row read the same row of x
    require(shared ? x.shape(0) == experts.shape(0)
                   : x.ndim() == 3 && x.shape(0) == experts.shape(0) && x.shape(1) == k,
            "x must be [rows, depth] or [rows, k, depth]");
    const int64_t count = weight.shape(0);
    o.arrays.push_back(astype(experts, int32));
    const size_t at = o.arrays.size() - 1;
    return operation("quire::expert_product",
                     {Shape{experts.shape(0), experts.shape(1), (int)o.tensors.columns}}, o.arrays,
                     [t = o.tensors, at, k, pairs, shared, count](const std::vector<array>& in, std::vector<array>& out) {
        // The weights of all experts are looked up when the task runs: their ids are data.
        std::vector<Weight> stack;
        for (int64_t e = 0; e < count; e++) stack.push_back(t.weight(in, e));
        return [stack, ids = in[at].data<int32_t>(), x = in[0].data<float>(), y = out[0].data<float>(), k, pairs,
                shared] {
            const Kernels& kernel = kernels();
            struct Share {  // of one expert: pairs, and the rows of x that they read
                std::vector<int32_t> pairs, sources;
                float* arranged;
            };
            std::vector<Share> shares(stack.size());
            for (int64_t pair = 0; pair < pairs; pair++) {
                Share& share = shares.at(ids[pair]);
                share.pairs.push_back((int32_t)pair);
                share.sources.push_back((int32_t)(shared ? pair / k : pair));
            }
            int64_t floats = 0;
            for (size_t e = 0; e < stack.size(); e++)
                floats += kernel.arranged_floats(stack[e], (int64_t)shares[e].pairs.size());
            float* arranged = scratch_rows(floats);
            const int64_t columns = stack[0].columns, depth = stack[0].depth;
            for (size_t e = 0; e < stack.size(); e++) {
                const int64_t count = (int64_t)shares[e].pairs.size();
                shares[e].arranged = arranged;
                if (count) kernel.arrange(stack[e], Source{x, depth, shares[e].sources.data()}, 0, count, arranged);
                arranged += kernel.arranged_floats(stack[e], count);
            }
            const auto run = [&](int64_t begin, int64_t end) {
                for (size_t e = 0; e < stack.size(); e++) {
                    const Share& share = shares[e];
                    if (share.pairs.empty()) continue;
                    const Rows part{(int64_t)share.pairs.size(), share.arranged, y, share.pairs.data(), columns};
                    kernel.product(stack[e], part, begin, end, scratch(kernel.scratch_floats(stack[e])));
                }
            };
            split(columns, kLeastWork / (depth * pairs) + 1, kColumnsMultiple, run);
        };
    })[0];
}

array rms_norm(const array& x, const std::optional<array>& weight, float eps,
               const std::optional<array>& residual, const std::optional<array>& factor) {
    using namespace mlx::core;
    require(x.dtype() == float32, "x must be float32");
    std::vector<array> inputs = {x};
    const auto place = [&](const std::optional<array>& part) {  // among the inputs; 0 if there is none
        if (part) inputs.push_back(*part);
        return part ? inputs.size() - 1 : 0;
    };
    require(!weight || (weight->dtype() == float32 && weight->size() == (size_t)x.shape(-1)),
            "weight must be float32");
    require(!residual || (residual->dtype() == float32 && residual->shape() == x.shape()),
            "residual must be as x");
    require(!factor || (factor->dtype() == float32 && factor->size() == 1), "factor must be one float32");
    const size_t places[] = {place(weight), place(residual), place(factor)};
    return operation("quire::rms_norm", {x.shape()}, inputs,
                     [eps, weighted = places[0], adds = places[1], scales = places[2]](
                         const std::vector<array>& in, std::vector<array>& out) {
        const auto part = [&](size_t at) { return at ? in[at].data<float>() : nullptr; };
        return [eps, weight = part(weighted), residual = part(adds), factor = part(scales), x = in[0].data<float>(),
                y = out[0].data<float>(), depth = in[0].shape(-1), rows = (int64_t)in[0].size() / in[0].shape(-1)] {
            split(rows, kLeastWork / depth + 1, 1, [&](int64_t begin, int64_t end) {
                kernels().rms_norm(x, weight, residual, factor, eps, depth, begin, end, y);
            });
        };
    })[0];
}

array gate(const array& gates, const array& up, const std::string& activation) {
    using namespace mlx::core;
    require(gates.dtype() == float32 && up.dtype() == float32, "both must be float32");
    require(gates.shape() == up.shape(), "both must have one shape");
    const int act = activation == "silu" ? 0 : 1;
    require(act == 0 || activation == "gelu_pytorch_tanh", "no such activation");
    return operation("quire::gate", {gates.shape()}, {gates, up},
                     [act](const std::vector<array>& in, std::vector<array>& out) {
        return [act, a = in[0].data<float>(), b = in[1].data<float>(), y = out[0].data<float>(),
                size = (int64_t)out[0].size()] {
            split(size, kLeastWork, 64, [&](int64_t begin, int64_t end) {
                kernels().gate(act, a, b, begin, end, y);
            });
        };
    })[0];
}

// Rotates the first `2 * half` elements of each head: x [rows, heads, dim] by [rows, half] cosines and
// sines; pairs are halves apart, or neighbours.
array rotate(const array& x, const array& cosines, const array& sines, bool neighbours) {
    using namespace mlx::core;
    require(x.dtype() == float32 && x.ndim() == 3, "x must be float32 [rows, heads, dim]");
    require(cosines.dtype() == float32 && cosines.shape() == sines.shape() && cosines.ndim() == 2 &&
                cosines.shape(0) == x.shape(0) && 2 * cosines.shape(1) <= x.shape(2),
            "cosines and sines must be float32 [rows, half]");
    return operation("quire::rotate", {x.shape()}, {x, cosines, sines},
                     [neighbours](const std::vector<array>& in, std::vector<array>& out) {
        return [neighbours, x = in[0].data<float>(), c = in[1].data<float>(), s = in[2].data<float>(),
                y = out[0].data<float>(), heads = in[0].shape(1), dim = in[0].shape(2),
                half = in[1].shape(1), rows = (int64_t)in[0].shape(0)] {
            split(rows, kLeastWork / (heads * dim) + 1, 1, [&](int64_t begin, int64_t end) {
                kernels().rotate(x, c, s, heads, dim, 2 * half, neighbours, begin, end, y);
            });
        };
    })[0];
}

Storage storage_of(const array& pool) {
    using namespace mlx::core;
    if (pool.dtype() == bfloat16) return Storage::bfloat16;
    if (pool.dtype() == float16) return Storage::float16;
    require(pool.dtype() == float32, "blocks must hold floats");
    return Storage::float32;
}

// The arrays of `attention.metadata` among an operation's inputs, from `at` on.
struct Tables {
    static constexpr int kCount = 6;
    const int32_t *table, *starts, *blocks, *rows, *first, *last;
    int sequences;
    Tables(const std::vector<array>& in, size_t at)
        : table(in[at].data<int32_t>()), starts(in[at + 1].data<int32_t>()),
          blocks(in[at + 2].data<int32_t>()), rows(in[at + 3].data<int32_t>()),
          first(in[at + 4].data<int32_t>()), last(in[at + 5].data<int32_t>()),
          sequences((int)in[at + 3].size() - 1) {}
};

// Rows of one sequence that are attended together, for one KV head.
struct Task {
    int sequence, kv_head;
    int64_t begin, end;
};

constexpr int64_t kTaskRows = 16;

// Cuts rows where `ends` says, and after `kTaskRows`.
template <class Ends> std::vector<Task> tasks_of(const Tables& t, int kv_heads, const Ends& ends) {
    std::vector<Task> tasks;
    for (int s = 0; s < t.sequences; s++) {
        for (int64_t row = t.rows[s]; row < t.rows[s + 1];) {
            int64_t end = row + 1;
            while (end < t.rows[s + 1] && end - row < kTaskRows && !ends(s, end)) end++;
            for (int head = 0; head < kv_heads; head++) tasks.push_back({s, head, row, end});
            row = end;
        }
    }
    return tasks;
}

void check_tables(const std::vector<array>& tables) {
    require(tables.size() == Tables::kCount, "there are six tables");
    for (const array& each : tables) require(each.dtype() == mlx::core::int32, "tables must be int32");
}

void check_heads(const PagedRows& p) {
    require(p.heads % p.kv_heads == 0, "the heads are no multiple of the KV heads");
    require(p.key_dim % 16 == 0 && p.value_dim % 16 == 0 && p.block % 16 == 0,
            "head sizes and blocks must be multiples of 16");
}

// Attention of a step's rows over blocks of floats; the tables are those of `attention.metadata`.
array attend(const array& q, const array& keys, const array& values, const std::vector<array>& tables,
             int kv_heads, float scale, float softcap, const std::optional<array>& sinks) {
    using namespace mlx::core;
    require(q.dtype() == float32 && q.ndim() == 3, "q must be float32 [rows, heads, key_dim]");
    require(keys.dtype() == values.dtype() && keys.shape(1) == values.shape(1), "keys and values differ");
    require(keys.shape(2) == q.shape(2), "q does not fit the keys");
    check_tables(tables);
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
    std::vector<array> inputs = {q, keys, values};
    inputs.insert(inputs.end(), tables.begin(), tables.end());
    if (sinks) inputs.push_back(astype(*sinks, float32));
    return operation("quire::attend", {Shape{q.shape(0), p.heads, p.value_dim}}, inputs,
                     [p](const std::vector<array>& in, std::vector<array>& out) mutable {
        p.q = in[0].data<float>();
        p.keys = in[1].data<char>();
        p.values = in[2].data<char>();
        p.sinks = in.size() > 9 ? in[9].data<float>() : nullptr;
        p.out = out[0].data<float>();
        return [p, t = Tables(in, 3)] {
            const auto tasks = tasks_of(t, p.kv_heads, [](int, int64_t) { return false; });
            parallel((int)tasks.size(), [&](int number) {
                const Task& task = tasks[number];
                PagedRows part = p;
                part.table = t.table + t.starts[task.sequence] - t.blocks[task.sequence];
                part.first = t.first;
                part.last = t.last;
                kernels().attend(part, task.kv_head, task.begin, task.end,
                                 scratch(kernels().attend_scratch_floats(part)));
            });
        };
    })[0];
}

// Stores vectors of a step's tokens in the blocks of a pool, where they lie if nobody else reads the pool.
// One pool each: outputs that belong together hold each other's inputs, which are copied then.
class Write : public mlx::core::Primitive {
public:
    explicit Write(mlx::core::Stream stream) : Primitive(stream) {}

    // Inputs: the pool, vectors, rows, offsets.
    void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
        auto& encoder = mlx::core::cpu::get_command_encoder(stream());
        array& pool = outputs[0];
        if (inputs[0].is_donatable() && inputs[0].flags().row_contiguous) {
            pool.copy_shared_buffer(inputs[0]);
        } else {
            pool.set_data(mlx::core::allocator::malloc(pool.nbytes()));
            encoder.dispatch(copying(inputs[0], pool));
        }
        const auto in_order = [&](const array& input) {
            return input.flags().row_contiguous ? input : copied(input, encoder);
        };
        const array vectors = in_order(inputs[1]), rows = in_order(inputs[2]), offsets = in_order(inputs[3]);
        encoder.dispatch([tokens = (int64_t)rows.shape(0), heads = (int64_t)rows.shape(1),
                          block = (int64_t)pool.shape(1), bytes = pool.shape(2) * (int64_t)pool.itemsize(),
                          row = rows.data<int32_t>(), offset = offsets.data<int32_t>(),
                          from = vectors.data<char>(), to = pool.data<char>()] {
            for (int64_t n = 0; n < tokens * heads; n++)
                std::memcpy(to + (row[n] * block + offset[n / heads]) * bytes, from + n * bytes, bytes);
        });
    }
    void eval_gpu(const std::vector<array>&, std::vector<array>&) override {
        throw std::runtime_error("quire's CPU kernels do not run on a GPU");
    }
    const char* name() const override { return "quire::write"; }
};

// The pool `[rows, block, dim]` gets vectors `[tokens, heads, dim]` at `rows` [tokens, heads] and `offsets`
// [tokens, 1]. As where MLX assigns, the pool's Python object becomes the pool after it.
void write_vectors(const nb::object& place, const array& vectors, const array& rows, const array& offsets) {
    using namespace mlx::core;
    array& pool = nb::cast<array&>(place);
    require(rows.dtype() == int32 && rows.ndim() == 2 && offsets.dtype() == int32 &&
                offsets.size() == (size_t)rows.shape(0),
            "rows are int32 [tokens, heads], offsets int32 [tokens, 1]");
    require(pool.ndim() == 3 && vectors.shape() == Shape{rows.shape(0), rows.shape(1), pool.shape(2)},
            "vectors must be [tokens, heads, dim]");
    std::vector<array> inputs = {pool, astype(vectors, pool.dtype()), rows, offsets};
    auto primitive = std::make_shared<Write>(default_stream(Device(Device::cpu)));
    pool.overwrite_descriptor(array(pool.shape(), pool.dtype(), primitive, std::move(inputs)));
}

// Codes, scales and biases of vectors, `[vectors, size * bits / 32]` and so on; with a codebook there
// are its levels in place of biases.
struct Codes {
    array codes, scales, offsets;
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

// Where a rotation is among an operation's inputs, if there is one: signs `[size]` or a matrix `[size, size]`.
struct TurnShape {
    size_t place = 0;
    bool signs = false;
    int size = 0;
    float scale = 1;

    // Adds the rotation to the inputs.
    TurnShape(const std::optional<array>& turn, float scale, int size, std::vector<array>& inputs)
        : place(inputs.size()), size(size), scale(scale) {
        if (!turn) {
            place = 0;
            return;
        }
        signs = turn->ndim() == 1;
        require(turn->dtype() == mlx::core::float32 && turn->shape(-1) == size && turn->shape(0) == size,
                "a rotation is float32, signs [size] or a matrix [size, size]");
        require(!signs || (size & (size - 1)) == 0, "signs belong to powers of two");
        inputs.push_back(*turn);
    }
    Turn at(const std::vector<array>& in) const {
        const float* map = place ? in[place].data<float>() : nullptr;
        return {signs ? map : nullptr, signs ? nullptr : map, size, scale};
    }
};

// Blocks of codes, as `cache.formats.base.CodedArrays` lists them.
struct CodedBlocks {
    std::vector<array> keys, values;
    int key_bits, value_bits;
    bool codebook, by_channel;
    int block;
    std::optional<array> key_turn, value_turn;
    float key_scale, value_scale;
};

// Blocks that are read as written: row r of sequence s reads the block `first_written[r] + n` so. Its keys
// are those at place `written_places[r] + n` of `arrays[2 * written_sources[s]]`, its values of the array
// after that. `places` are these three: first_written, written_sources, written_places.
struct Written {
    std::vector<array> arrays, places;

    // Adds them to the inputs.
    Written(const std::vector<array>& arrays, const std::vector<array>& places, int out_dim,
            std::vector<array>& inputs)
        : arrays(arrays), places(places) {
        using namespace mlx::core;
        if (arrays.empty()) return;
        require(places.size() == 3, "written blocks need their three tables");
        for (const array& each : places) require(each.dtype() == int32, "places must be int32");
        for (const array& each : arrays) require(each.dtype() == float32, "written blocks must be float32");
        require(arrays[1].shape(-1) == out_dim, "written values must be as long as outputs");
        inputs.insert(inputs.end(), places.begin(), places.end());
        inputs.insert(inputs.end(), arrays.begin(), arrays.end());
    }
};

// The same over blocks of codes, and over blocks as written: [rows, heads, out_dim].
array attend_coded(const array& q, const CodedBlocks& blocks, const std::vector<array>& tables,
                   const std::vector<array>& written_arrays, const std::vector<array>& written_tables,
                   int kv_heads, int out_dim, float scale, float softcap, const std::optional<array>& sinks) {
    using namespace mlx::core;
    require(q.dtype() == float32 && q.ndim() == 3, "q must be float32 [rows, heads, dim]");
    check_tables(tables);
    const Codes k(blocks.keys, blocks.key_bits, blocks.codebook), v(blocks.values, blocks.value_bits, blocks.codebook);
    const CodedShape k_shape(k), v_shape(v);
    PagedRows p{};
    p.heads = q.shape(1);
    p.kv_heads = kv_heads;
    p.q_dim = q.shape(2);
    p.key_dim = blocks.by_channel ? p.q_dim : k_shape.size;
    p.value_dim = v_shape.size;
    p.out_dim = out_dim;
    p.block = blocks.block;
    p.blocks = blocks.by_channel ? Blocks::channels : Blocks::tokens;
    p.storage = Storage::float32;
    p.first_written = INT32_MAX;
    p.scale = scale;
    p.softcap = softcap;
    require(!blocks.by_channel || k_shape.size == p.block, "a channel is as long as a block");
    require(p.q_dim <= p.key_dim && out_dim <= p.value_dim && p.q_dim % 16 == 0 && out_dim % 16 == 0,
            "q does not fit the keys, or outputs the values");
    check_heads(p);
    std::vector<array> inputs = {q, k.codes, k.scales, k.offsets, v.codes, v.scales, v.offsets};
    inputs.insert(inputs.end(), tables.begin(), tables.end());
    const size_t places_at = inputs.size();
    const Written written(written_arrays, written_tables, out_dim, inputs);
    const TurnShape key_turn(blocks.key_turn, blocks.key_scale, p.key_dim, inputs);
    const TurnShape value_turn(blocks.value_turn, blocks.value_scale, p.value_dim, inputs);
    const size_t sinks_at = sinks ? inputs.size() : 0, sources_count = written.arrays.size();
    if (sinks) inputs.push_back(astype(*sinks, float32));
    return operation("quire::attend_coded", {Shape{q.shape(0), p.heads, out_dim}}, inputs,
                     [=](const std::vector<array>& in, std::vector<array>& out) mutable {
        constexpr size_t kTables = 7;
        p.q = in[0].data<float>();
        p.coded_keys = k_shape.at(in, 1);
        p.coded_values = v_shape.at(in, 4);
        p.key_turn = key_turn.at(in);
        p.value_turn = value_turn.at(in);
        p.sinks = sinks_at ? in[sinks_at].data<float>() : nullptr;
        p.out = out[0].data<float>();
        const bool tails = sources_count > 0;
        std::vector<const float*> sources;
        for (size_t i = 0; i < sources_count; i++) sources.push_back(in[places_at + 3 + i].data<float>());
        const auto place = [&](size_t i) { return tails ? in[places_at + i].data<int32_t>() : nullptr; };
        return [p, t = Tables(in, kTables), sources, first_written = place(0), source = place(1),
                at = place(2), tails] {
            // Rows that are read together have one own block, from which on blocks are as written.
            const auto ends = [&](int, int64_t row) {
                return tails && first_written[row] != first_written[row - 1];
            };
            const auto tasks = tasks_of(t, p.kv_heads, ends);
            parallel((int)tasks.size(), [&](int number) {
                const Task& task = tasks[number];
                const int s = task.sequence;
                PagedRows part = p;
                part.table = t.table + t.starts[s] - t.blocks[s];
                part.first = t.first;
                part.last = t.last;
                if (tails) {
                    part.written_keys = sources[2 * source[s]];
                    part.written_values = sources[2 * source[s] + 1];
                    part.first_written = first_written[task.begin];
                    part.written_place = at[task.begin];
                }
                kernels().attend(part, task.kv_head, task.begin, task.end,
                                 scratch(kernels().attend_scratch_floats(part)));
            });
        };
    })[0];
}

}  // namespace
}  // namespace quire

NB_MODULE(_cpu, m) {
    using namespace quire;
    nb::module_::import_("mlx.core");
    m.attr("MLX_VERSION") = std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) +
                            "." + std::to_string(MLX_VERSION_PATCH);
    m.attr("SOURCES") = QUIRE_SOURCES;
    quire::use("");
    m.def("use", &quire::use, nb::arg("instructions"));
    m.def("instructions", [] { return std::string(kernels().name); });
    m.def("set_threads", &set_threads, nb::arg("count"));
    m.def("threads", &threads);
    m.def("product", &product, nb::arg("x"), nb::arg("weight"), nb::arg("scales").none() = nb::none(),
          nb::arg("biases").none() = nb::none(), nb::arg("offsets").none() = nb::none(),
          nb::arg("group_size") = 0, nb::arg("bits") = 0, nb::arg("mode") = "affine");
    m.def("expert_product", &expert_product, nb::arg("x"), nb::arg("experts"), nb::arg("weight"),
          nb::arg("scales").none() = nb::none(), nb::arg("biases").none() = nb::none(),
          nb::arg("offsets").none() = nb::none(), nb::arg("group_size") = 0, nb::arg("bits") = 0,
          nb::arg("mode") = "affine");
    m.def("rms_norm", &rms_norm, nb::arg("x"), nb::arg("weight").none(), nb::arg("eps"),
          nb::arg("residual").none() = nb::none(), nb::arg("factor").none() = nb::none());
    m.def("attend", &attend, nb::arg("q"), nb::arg("keys"), nb::arg("values"), nb::arg("tables"),
          nb::arg("kv_heads"), nb::arg("scale"), nb::arg("softcap") = 0.0f,
          nb::arg("sinks").none() = nb::none());
    m.def(
        "attend_coded",
        [](const array& q, const std::vector<array>& keys, int key_bits, const std::vector<array>& values,
           int value_bits, bool codebook, bool by_channel, int block, const std::optional<array>& key_turn,
           float key_scale, const std::optional<array>& value_turn, float value_scale,
           const std::vector<array>& tables, const std::vector<array>& written,
           const std::vector<array>& places, int kv_heads, int value_dim, float scale, float softcap,
           const std::optional<array>& sinks) {
            const CodedBlocks blocks{keys, values, key_bits, value_bits, codebook, by_channel, block, key_turn,
                                     value_turn, key_scale, value_scale};
            return attend_coded(q, blocks, tables, written, places, kv_heads, value_dim, scale, softcap, sinks);
        },
        nb::arg("q"), nb::arg("keys"), nb::arg("key_bits"), nb::arg("values"), nb::arg("value_bits"),
        nb::arg("codebook"), nb::arg("by_channel"), nb::arg("block_tokens"), nb::arg("key_turn").none(),
        nb::arg("key_scale"), nb::arg("value_turn").none(), nb::arg("value_scale"), nb::arg("tables"),
        nb::arg("written"), nb::arg("places"), nb::arg("kv_heads"), nb::arg("value_dim"), nb::arg("scale"),
        nb::arg("softcap") = 0.0f, nb::arg("sinks").none() = nb::none());
    m.def("write_vectors", &write_vectors, nb::arg("pool"), nb::arg("vectors"), nb::arg("rows"), nb::arg("offsets"));
    m.def("rotate", &rotate, nb::arg("x"), nb::arg("cosines"), nb::arg("sines"), nb::arg("neighbours"));
    m.def("gate", &gate, nb::arg("gates"), nb::arg("up"), nb::arg("activation"));
}
