#include "matrix.h"

namespace quire {
namespace {

constexpr int64_t kTile = 16;  // columns of a tile of codes, see `Weight::tiled`
constexpr int64_t kTilesTogether = 4;  // which kernels multiply, by twos or fours, in less time than alone

// The type of a packing's scales; of bytes, float32.
Storage scale_type_of(const array& scales, Storage packing) {
    using namespace mlx::core;
    if (packing == Storage::affine && scales.dtype() == bfloat16) return Storage::bfloat16;
    if (packing == Storage::affine && scales.dtype() == float16) return Storage::float16;
    const bool floats = packing == Storage::affine || packing == Storage::fp8;
    require(scales.dtype() == (floats ? float32 : uint8), "scales have the wrong type");
    return Storage::float32;
}

// Signed codes (GGUF's Q4_0 and Q8_0) have biases that follow from their scales: then these are not read.
void leave_out_biases(Weight& w) {
    if (!w.biases) return;
    const float factor = -(float)(1 << (w.bits - 1));
    for (int64_t at = 0; at < w.columns * (w.depth / w.group); at++)
        if (number_at(w.scale_type, w.biases, at) != factor * number_at(w.scale_type, w.scales, at)) return;
    w.biases = nullptr;
    w.bias_factor = factor;
}

}  // namespace

float number_at(Storage type, const void* from, int64_t at) {
    if (type == Storage::float32) return ((const float*)from)[at];
    if (type == Storage::bfloat16) return ((const mlx::core::bfloat16_t*)from)[at];
    return ((const mlx::core::float16_t*)from)[at];
}

bool alike(const Weight& a, const Weight& b) {
    return a.storage == b.storage && a.bits == b.bits && a.group == b.group && a.depth == b.depth && a.tiled == b.tiled;
}

Storage storage_of(const std::string& mode) {
    if (mode == "affine") return Storage::affine;
    if (mode == "mxfp4") return Storage::mxfp4;
    if (mode == "mxfp8") return Storage::mxfp8;
    if (mode == "nvfp4") return Storage::nvfp4;
    if (mode == "fp8") return Storage::fp8;
    throw std::invalid_argument("no packing is called " + mode);
}

Weight Tensors::weight(const std::vector<array>& in, int64_t expert) const {
    Weight w{storage, bits, group, columns, depth, nullptr, nullptr, nullptr, nullptr, scale_type, tiled};
    size_t at = first;
    const auto part = [&](int64_t bytes) { return (const char*)in[at++].data<char>() + expert * bytes; };
    const int64_t width = storage == Storage::float32 ? 32 : storage == Storage::bfloat16 ? 16 : bits;
    w.values = part(columns * depth * width / 8);
    if (group) {
        const int64_t groups = columns * (depth / group);
        const bool floats = storage == Storage::affine || storage == Storage::fp8;
        const int64_t bytes = !floats ? 1 : scale_type == Storage::float32 ? 4 : 2;
        w.scales = part(groups * bytes);
        if (has_biases) w.biases = part(groups * bytes);
    }
    if (has_offsets) w.offsets = (const float*)part(columns * 4);
    return w;
}

std::vector<Weight> Tensors::stack(const std::vector<array>& in, int64_t count) const {
    std::vector<Weight> weights;
    for (int64_t expert = 0; expert < count; expert++) weights.push_back(weight(in, expert));
    return weights;
}

Matrix::Matrix(const array& weight, const std::optional<array>& scales, const std::optional<array>& biases,
               const std::optional<array>& offsets, int group, int bits, const std::string& mode, bool tiled)
    : arrays_{weight}, tensors_{} {
    using namespace mlx::core;
    require(weight.ndim() >= 2, "the weight must be a matrix");
    Tensors& t = tensors_;
    t.columns = weight.shape(-2);
    t.depth = weight.shape(-1);
    t.tiled = tiled;
    require(!tiled || (scales && t.columns % kTile == 0 && kernels().reads_tiles(storage_of(mode), bits)),
            "these kernels do not read such codes in tiles");
    if (scales) {
        t.storage = storage_of(mode);
        t.bits = bits;
        t.group = group;
        require(weight.dtype() == uint32 && bits > 0, "codes must be uint32");
        t.depth = (int64_t)weight.shape(-1) * 32 / bits;
        require((int64_t)scales->shape(-1) * group == t.depth, "scales must be as deep as the codes");
        t.scale_type = scale_type_of(*scales, t.storage);
        arrays_.push_back(*scales);
        t.has_biases = t.storage == Storage::affine;
        require(t.has_biases == biases.has_value(), "affine codes have biases, others none");
        if (biases) {
            require(biases->dtype() == scales->dtype(), "biases must have the type of scales");
            arrays_.push_back(*biases);
        }
    } else {
        require(weight.dtype() == float32 || weight.dtype() == bfloat16, "the weight must be float32 or bfloat16");
        t.storage = weight.dtype() == float32 ? Storage::float32 : Storage::bfloat16;
        t.scale_type = Storage::float32;
    }
    t.has_offsets = offsets.has_value();
    if (offsets) {
        require(offsets->shape(-1) == t.columns, "the bias must be one a column");
        arrays_.push_back(astype(*offsets, float32));
    }
}

Weight Matrix::evaluated() const { return evaluated_stack()[0]; }

std::vector<Weight> Matrix::evaluated_stack() const {
    mlx::core::eval(arrays_);
    for (const array& each : arrays_) require(each.flags().row_contiguous, "the weight must be row by row");
    Tensors tensors = tensors_;
    tensors.first = 0;
    std::vector<Weight> stack = tensors.stack(arrays_, arrays_[0].ndim() == 3 ? arrays_[0].shape(0) : 1);
    for (Weight& each : stack) leave_out_biases(each);
    return stack;
}

Tensors Matrix::among(std::vector<array>& inputs) const {
    Tensors tensors = tensors_;
    tensors.first = inputs.size();
    inputs.insert(inputs.end(), arrays_.begin(), arrays_.end());
    return tensors;
}

void split_columns(const std::vector<int64_t>& columns, int64_t rows, int64_t depth,
                   const std::function<void(size_t, int64_t, int64_t)>& run) {
    struct Piece {
        size_t product;
        int64_t begin, end;
    };
    int64_t all = 0;
    for (const int64_t own : columns) all += own;
    const int64_t least = kLeastWork / (depth * rows) + 1;
    const int64_t even = all / parts_of(all, least);
    int64_t multiple = kTile;
    while (multiple < even && multiple < kTilesTogether * kTile) multiple *= 2;
    const int64_t each = (even + multiple - 1) / multiple * multiple;
    std::vector<Piece> pieces;
    for (size_t product = 0; product < columns.size(); product++)
        for (int64_t begin = 0; begin < columns[product]; begin += each)
            pieces.push_back({product, begin, std::min(columns[product], begin + each)});
    const auto run_piece = [&](int part) { run(pieces[part].product, pieces[part].begin, pieces[part].end); };
    parallel((int)pieces.size(), run_piece, worth_waking(all, least));
}

void multiply_arranged(const std::vector<Product>& products, const float* arranged, int64_t count) {
    const Kernels& k = kernels();
    std::vector<int64_t> columns;
    for (const Product& each : products) columns.push_back(each.weight.columns);
    split_columns(columns, count, products[0].weight.depth, [&](size_t number, int64_t begin, int64_t end) {
        const auto& [weight, out] = products[number];
        const Rows rows{count, arranged, out, nullptr, weight.columns};
        k.product(weight, rows, begin, end, scratch(k.scratch_floats(weight)));
    });
}

void multiply(const std::vector<Product>& products, const float* x, int64_t count) {
    const Kernels& k = kernels();
    for (size_t first = 0, past; first < products.size(); first = past) {
        const Weight& w = products[first].weight;
        float* arranged = scratch_rows(k.arranged_floats(w, count));
        split(count, kLeastWork / w.depth + 1, k.arranged_together(w), [&](int64_t begin, int64_t end) {
            k.arrange(w, Source{x, w.depth, nullptr}, count, begin, end, arranged);
        });
        past = first;
        while (past < products.size() && alike(w, products[past].weight)) past++;
        multiply_arranged({products.begin() + (int64_t)first, products.begin() + (int64_t)past}, arranged, count);
    }
}

namespace {

// What one expert multiplies: pairs of rows and experts, and the rows of x that they read.
struct ExpertRows {
    std::vector<int32_t> pairs, sources;
    float* arranged;
};

}  // namespace

void multiply_experts(const std::vector<Weight>& stack, const int32_t* ids, int64_t pairs, int64_t together,
                      const float* x, float* y) {
    const Kernels& kernel = kernels();
    std::vector<ExpertRows> shares(stack.size());
    for (int64_t pair = 0; pair < pairs; pair++) {
        ExpertRows& share = shares.at(ids[pair]);
        share.pairs.push_back((int32_t)pair);
        share.sources.push_back((int32_t)(pair / together));
    }
    std::vector<size_t> chosen;  // experts that have rows
    int64_t floats = 0;
    for (size_t e = 0; e < stack.size(); e++) {
        if (shares[e].pairs.empty()) continue;
        chosen.push_back(e);
        floats += kernel.arranged_floats(stack[e], (int64_t)shares[e].pairs.size());
    }
    if (chosen.empty()) return;
    float* arranged = scratch_rows(floats);
    for (const size_t e : chosen) {
        shares[e].arranged = arranged;
        arranged += kernel.arranged_floats(stack[e], (int64_t)shares[e].pairs.size());
    }
    const int64_t columns = stack[0].columns, depth = stack[0].depth;
    split((int64_t)chosen.size(), kLeastWork / depth + 1, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const ExpertRows& share = shares[chosen[i]];
            const int64_t count = (int64_t)share.pairs.size();
            kernel.arrange(stack[chosen[i]], Source{x, depth, share.sources.data()}, count, 0, count, share.arranged);
        }
    });
    const int64_t rows = (pairs + (int64_t)chosen.size() - 1) / (int64_t)chosen.size();
    split_columns(std::vector<int64_t>(chosen.size(), columns), rows, depth,
                  [&](size_t number, int64_t begin, int64_t end) {
        const Weight& w = stack[chosen[number]];
        const ExpertRows& share = shares[chosen[number]];
        const Rows part{(int64_t)share.pairs.size(), share.arranged, y, share.pairs.data(), columns};
        kernel.product(w, part, begin, end, scratch(kernel.scratch_floats(w)));
    });
}

void mix_rows(const float* y, const float* weights, int64_t k, int64_t width, int64_t begin, int64_t end, float* out) {
    for (int64_t row = begin; row < end; row++) {
        float* to = out + row * width;
        for (int64_t j = 0; j < k; j++) {
            const float* from = y + (row * k + j) * width;
            const float weight = weights[row * k + j];
            for (int64_t i = 0; i < width; i++) {
                const float product = weight * from[i];
                to[i] = j == 0 ? product : to[i] + product;
            }
        }
    }
}

}  // namespace quire
