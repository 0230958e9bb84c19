// Products, and operations on rows, as MLX operations, and the extension's Python face.

#include "matrix.h"

namespace quire {
namespace {

Kernels chosen;

// Chooses an instruction set, and the bits of the integers that rows become beside packed weights: 8 or 16.
bool use(const std::string& name, int activation_bits) {
    require(activation_bits == 8 || activation_bits == 16, "activations have 8 bits or 16");
    for (const Kernels* each : available_kernels()) {
        if (name.empty() || name == each->name) {
            chosen = activation_bits == 16 ? *each : with_products(*each, each->name, each->bytes, each->bytes);
            return true;
        }
    }
    return false;
}

void check_rows(const array& x, const Matrix& matrix) {
    require(x.dtype() == mlx::core::float32 && x.ndim() >= 1, "x must be float32");
    require((int64_t)x.shape(-1) == matrix.depth(), "the weight must be as deep as x");
}

array product(const array& x, const array& weight, const std::optional<array>& scales,
              const std::optional<array>& biases, const std::optional<array>& offsets, int group,
              int bits, const std::string& mode, bool tiled) {
    const Matrix matrix(weight, scales, biases, offsets, group, bits, mode, tiled);
    require(weight.ndim() == 2, "the weight must be a matrix");
    check_rows(x, matrix);
    auto shape = x.shape();
    shape.back() = (int)matrix.columns();
    std::vector<array> inputs = {x};
    const Tensors tensors = matrix.among(inputs);
    return operation("quire::product", {shape}, inputs,
                     [t = tensors](const std::vector<array>& in, std::vector<array>& out) {
        return [w = t.weight(in), x = in[0].data<float>(), y = out[0].data<float>(),
                count = (int64_t)in[0].size() / t.depth] { multiply({{w, y}}, x, count); };
    })[0];
}

// Products with experts: row i of x with the matrix `experts[i]` of a stack `[experts, columns, ...]`.
array expert_product(const array& x, const array& experts, const array& weight,
                     const std::optional<array>& scales, const std::optional<array>& biases,
                     const std::optional<array>& offsets, int group, int bits, const std::string& mode, bool tiled) {
    using namespace mlx::core;
    const Matrix stacked(weight, scales, biases, offsets, group, bits, mode, tiled);
    check_rows(x, stacked);
    require(weight.ndim() == 3, "the weights must be a stack of matrices");
    require(experts.ndim() == 2, "experts must be [rows, k]");
    const int64_t k = experts.shape(1), pairs = experts.size();
    const bool shared = x.ndim() == 2;  // the k experts of a row read the same row of x
    require(shared ? x.shape(0) == experts.shape(0)
                   : x.ndim() == 3 && x.shape(0) == experts.shape(0) && x.shape(1) == k,
            "x must be [rows, depth] or [rows, k, depth]");
    const int64_t count = weight.shape(0);
    std::vector<array> inputs = {x};
    const Tensors tensors = stacked.among(inputs);
    const size_t at = inputs.size();
    inputs.push_back(astype(experts, int32));
    return operation("quire::expert_product",
                     {Shape{experts.shape(0), experts.shape(1), (int)stacked.columns()}}, inputs,
                     [t = tensors, at, k, pairs, shared, count](const std::vector<array>& in, std::vector<array>& out) {
        // The weights of all experts are looked up when the task runs: their ids are data.
        return [stack = t.stack(in, count), ids = in[at].data<int32_t>(), x = in[0].data<float>(),
                y = out[0].data<float>(), k, pairs, shared] {
            multiply_experts(stack, ids, pairs, shared ? k : 1, x, y);
        };
    })[0];
}

// Weighted sums of the experts' outputs of each row: y [rows, k, width] by weights [rows, k].
array mix(const array& y, const array& weights) {
    using namespace mlx::core;
    require(y.dtype() == float32 && y.ndim() == 3 && weights.dtype() == float32 && weights.ndim() == 2 &&
                weights.shape(0) == y.shape(0) && weights.shape(1) == y.shape(1),
            "y must be float32 [rows, k, width], weights [rows, k]");
    return operation("quire::mix", {Shape{y.shape(0), y.shape(2)}}, {y, weights},
                     [](const std::vector<array>& in, std::vector<array>& out) {
        return [y = in[0].data<float>(), weights = in[1].data<float>(), rows = (int64_t)in[0].shape(0),
                k = (int64_t)in[0].shape(1), width = (int64_t)in[0].shape(2), to = out[0].data<float>()] {
            split(rows, kLeastWork / (k * width) + 1, 1,
                  [&](int64_t begin, int64_t end) { mix_rows(y, weights, k, width, begin, end, to); });
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
    const int act = activation_of(activation);
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

array tanh(const array& x) {
    using namespace mlx::core;
    require(x.dtype() == float32, "x must be float32");
    return operation("quire::tanh", {x.shape()}, {x}, [](const std::vector<array>& in, std::vector<array>& out) {
        return [x = in[0].data<float>(), y = out[0].data<float>(), size = (int64_t)out[0].size()] {
            split(size, kLeastWork / 4, 64, [&](int64_t begin, int64_t end) { kernels().tanh(x, begin, end, y); });
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

// y + (x * inner) * outer, by the matrices that each row's number names.
array add_low_rank(const array& y, const array& x, const array& numbers, const array& inner, const array& outer) {
    using namespace mlx::core;
    require(x.dtype() == float32 && y.dtype() == float32 && x.ndim() == 2 && y.ndim() == 2 &&
                x.shape(0) == y.shape(0), "rows must be float32 [rows, in] and [rows, out]");
    require(numbers.dtype() == int32 && (int64_t)numbers.size() == x.shape(0), "numbers must be int32 [rows]");
    require_low_rank(inner, outer, x.shape(1), y.shape(1));
    return operation("quire::add_low_rank", {y.shape()}, {y, x, numbers, inner, outer},
                     [](const std::vector<array>& in, std::vector<array>& out) {
        const LowRank factors = low_rank(in[3], in[4]);
        return [factors, y = in[0].data<float>(), x = in[1].data<float>(), numbers = in[2].data<int32_t>(),
                rows = (int64_t)in[0].shape(0), to = out[0].data<float>()] {
            split(rows, kLeastWork / work_of(factors) + 1, 1, [&](int64_t begin, int64_t end) {
                kernels().add_low_rank(factors, x, numbers, y, begin, end, to);
            });
        };
    })[0];
}

}  // namespace

void require_low_rank(const array& inner, const array& outer, int64_t depth, int64_t columns) {
    require(inner.dtype() == mlx::core::float32 && outer.dtype() == mlx::core::float32 && inner.ndim() == 3 &&
                outer.ndim() == 3, "factors must be float32 [numbers, rank, in] and [numbers, rank, out]");
    require(inner.shape(2) == depth && outer.shape(2) == columns && inner.shape(1) == outer.shape(1) &&
                inner.shape(0) == outer.shape(0), "the factors do not fit the rows");
}

LowRank low_rank(const array& inner, const array& outer) {
    return {inner.data<float>(), outer.data<float>(), inner.shape(2), inner.shape(1), outer.shape(2)};
}

int64_t work_of(const LowRank& factors) { return factors.rank * (factors.depth + factors.columns); }

const Kernels& kernels() { return chosen; }

int activation_of(const std::string& name) {
    require(name == "silu" || name == "gelu_pytorch_tanh", "no such activation");
    return name == "silu" ? 0 : 1;
}

}  // namespace quire

NB_MODULE(_cpu, m) {
    using namespace quire;
    nb::module_::import_("mlx.core");
    m.attr("MLX_VERSION") = std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) +
                            "." + std::to_string(MLX_VERSION_PATCH);
    m.attr("SOURCES") = QUIRE_SOURCES;
    quire::use("", 16);
    m.def("use", &quire::use, nb::arg("instructions"), nb::arg("activation_bits") = 16);
    m.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (const Kernels* each : available_kernels()) names.push_back(each->name);
        return names;
    });
    m.def("instructions", [] { return std::string(kernels().name); });
    m.def("set_threads", &set_threads, nb::arg("count"));
    m.def("threads", &threads);
    m.def("wakings", &wakings);
    m.def("product", &product, nb::arg("x"), nb::arg("weight"), nb::arg("scales").none() = nb::none(),
          nb::arg("biases").none() = nb::none(), nb::arg("offsets").none() = nb::none(),
          nb::arg("group_size") = 0, nb::arg("bits") = 0, nb::arg("mode") = "affine", nb::arg("tiled") = false);
    m.def("reads_tiles", [](int bits, const std::string& mode) { return kernels().reads_tiles(storage_of(mode), bits); },
          nb::arg("bits"), nb::arg("mode"));
    m.def("expert_product", &expert_product, nb::arg("x"), nb::arg("experts"), nb::arg("weight"),
          nb::arg("scales").none() = nb::none(), nb::arg("biases").none() = nb::none(),
          nb::arg("offsets").none() = nb::none(), nb::arg("group_size") = 0, nb::arg("bits") = 0,
          nb::arg("mode") = "affine", nb::arg("tiled") = false);
    m.def("mix", &mix, nb::arg("y"), nb::arg("weights"));
    m.def("rms_norm", &rms_norm, nb::arg("x"), nb::arg("weight").none(), nb::arg("eps"),
          nb::arg("residual").none() = nb::none(), nb::arg("factor").none() = nb::none());
    m.def("rotate", &rotate, nb::arg("x"), nb::arg("cosines"), nb::arg("sines"), nb::arg("neighbours"));
    m.def("tanh", [](const array& x) { return quire::tanh(x); }, nb::arg("x"));
    m.def("gate", &gate, nb::arg("gates"), nb::arg("up"), nb::arg("activation"));
    m.def("add_low_rank", &add_low_rank, nb::arg("y"), nb::arg("x"), nb::arg("numbers"), nb::arg("inner"),
          nb::arg("outer"));
    quire::bind_attention(m);
    quire::bind_cache(m);
    quire::bind_recurrent(m);
    quire::bind_layers(m);
    quire::bind_pages(m);
    quire::bind_routing(m);
    quire::bind_sampling(m);
    quire::bind_drafts(m);
    quire::bind_segments(m);
}
