// What a decoder's layer does to rows between its norms and its attention, as one operation each: the kernels run
// one after another, without a node of MLX's for each. The bits are those of the operations apart.

#include "matrix.h"

namespace quire {
namespace {

// down(act(gate(x)) * up(x))
array gated_mlp(const array& x, const Matrix& gate, const Matrix& up, const Matrix& down,
                const std::string& activation) {
    using namespace mlx::core;
    require(x.dtype() == float32 && x.ndim() >= 1 && x.shape(-1) == gate.depth(), "x must be float32 [..., depth]");
    require(up.depth() == gate.depth() && up.columns() == gate.columns() && down.depth() == gate.columns(),
            "the matrices do not fit each other");
    const int act = activation_of(activation);
    const int64_t width = gate.columns(), rows = (int64_t)x.size() / gate.depth();
    auto shape = x.shape();
    shape.back() = (int)down.columns();
    std::vector<array> inputs = {x};
    const Tensors g = gate.among(inputs), u = up.among(inputs), d = down.among(inputs);
    return operation("quire::gated_mlp", {shape}, inputs,
                     [g, u, d, act, rows, width](const std::vector<array>& in, std::vector<array>& out) {
        array inner = room(2 * rows * width);
        return [g = g.weight(in), u = u.weight(in), d = d.weight(in), inner, act, rows, width,
                x = in[0].data<float>(), y = out[0].data<float>()]() mutable {
            float *gates = inner.data<float>(), *ups = gates + rows * width;
            multiply({{g, gates}, {u, ups}}, x, rows);
            split(rows * width, kLeastWork, 64, [&](int64_t begin, int64_t end) {
                kernels().gate(act, gates, ups, begin, end, gates);
            });
            multiply({{d, y}}, gates, rows);
        };
    })[0];
}

// Queries, keys or values: a product, by head, perhaps normalised, then perhaps rotated.
struct HeadPart {
    std::optional<Matrix> matrix;  // none: the product of the part before
    int heads;
    bool normed, rotated;       // rotated where there are angles
    std::optional<array> norm;  // [dim]
};

struct Rotation {
    const float *cosines, *sines;  // [rows, half]
    int half;
    bool neighbours;
};

// One part as its task computes it.
struct PartTask {
    float* out;  // [rows, heads, dim]
    int heads, dim;
    bool normed, rotated;
    const float* norm;

    void finish(int64_t rows, float eps, const Rotation& angles) const {
        const int64_t all = rows * heads;
        if (normed) {
            split(all, kLeastWork / dim + 1, 1, [&](int64_t begin, int64_t end) {
                kernels().rms_norm(out, norm, nullptr, nullptr, eps, dim, begin, end, out);
            });
        }
        if (rotated) {
            split(rows, kLeastWork / (heads * dim) + 1, 1, [&](int64_t begin, int64_t end) {
                kernels().rotate(out, angles.cosines, angles.sines, heads, dim, 2 * angles.half, angles.neighbours,
                                 begin, end, out);
            });
        }
    }
};

// The parts of rows `[rows, depth]`, each `[rows, heads, dim]`.
std::vector<array> heads(const array& x, const std::vector<HeadPart>& parts, float eps,
                         const std::optional<array>& cosines, const std::optional<array>& sines, bool neighbours) {
    using namespace mlx::core;
    require(x.dtype() == float32 && x.ndim() == 2, "x must be float32 [rows, depth]");
    require(!parts.empty() && parts[0].matrix, "the first part has a matrix");
    const int rows = x.shape(0);
    std::vector<array> inputs = {x};
    if (cosines) {
        require(sines && cosines->dtype() == float32 && cosines->shape() == sines->shape() && cosines->ndim() == 2 &&
                    cosines->shape(0) == rows,
                "cosines and sines must be float32 [rows, half]");
        inputs.push_back(*cosines);
        inputs.push_back(*sines);
    }
    struct Place {
        std::optional<Tensors> tensors;
        size_t norm;  // among the inputs; 0: none
        int heads, dim;
        bool normed, rotated;
    };
    std::vector<Place> places;
    std::vector<Shape> shapes;
    int64_t columns = 0;
    for (const HeadPart& part : parts) {
        Place place{std::nullopt, 0, part.heads, 0, part.normed, part.rotated && cosines};
        if (part.matrix) {
            require(part.matrix->depth() == x.shape(1), "the matrices must be as deep as x");
            place.tensors = part.matrix->among(inputs);
            columns = part.matrix->columns();
        }
        require(columns % part.heads == 0, "the columns are no multiple of the heads");
        place.dim = (int)(columns / part.heads);
        require(!place.rotated || 2 * cosines->shape(1) <= place.dim, "cosines do not fit the heads");
        if (part.norm) {
            require(part.norm->dtype() == float32 && (int)part.norm->size() == place.dim, "norms must be float32 [dim]");
            place.norm = inputs.size();
            inputs.push_back(*part.norm);
        }
        places.push_back(place);
        shapes.push_back(Shape{rows, part.heads, place.dim});
    }
    return operation("quire::heads", shapes, inputs,
                     [places, eps, rows, neighbours, rotated = cosines.has_value()](const std::vector<array>& in,
                                                                                 std::vector<array>& out) {
        std::vector<Product> products;
        std::vector<PartTask> tasks;
        std::vector<bool> copied;
        for (size_t i = 0; i < places.size(); i++) {
            const Place& p = places[i];
            float* to = out[i].data<float>();
            if (p.tensors) products.push_back({p.tensors->weight(in), to});
            copied.push_back(!p.tensors);
            tasks.push_back({to, p.heads, p.dim, p.normed, p.rotated, p.norm ? in[p.norm].data<float>() : nullptr});
        }
        Rotation angles{};
        if (rotated) angles = {in[1].data<float>(), in[2].data<float>(), in[1].shape(1), neighbours};
        return [products, tasks, copied, angles, eps, rows, x = in[0].data<float>()] {
            multiply(products, x, rows);
            for (size_t i = 1; i < tasks.size(); i++) {
                if (copied[i]) std::memcpy(tasks[i].out, tasks[i - 1].out, (size_t)rows * tasks[i].heads * tasks[i].dim * 4);
            }
            for (const PartTask& task : tasks) task.finish(rows, eps, angles);
        };
    });
}

}  // namespace

void bind_layers(nb::module_& m) {
    using Maybe = std::optional<array>;
    nb::class_<Matrix>(m, "Matrix")
        .def(nb::init<const array&, const Maybe&, const Maybe&, const Maybe&, int, int, const std::string&, bool>(),
             nb::arg("weight"), nb::arg("scales").none() = nb::none(), nb::arg("biases").none() = nb::none(),
             nb::arg("offsets").none() = nb::none(), nb::arg("group_size") = 0, nb::arg("bits") = 0,
             nb::arg("mode") = "affine", nb::arg("tiled") = false)
        .def_prop_ro("reads_biases", [](const Matrix& matrix) { return matrix.evaluated().biases != nullptr; });
    nb::class_<HeadPart>(m, "HeadPart")
        .def(nb::init<std::optional<Matrix>, int, bool, bool, Maybe>(), nb::arg("matrix").none(), nb::arg("heads"),
             nb::arg("normed"), nb::arg("rotated"), nb::arg("norm").none());
    m.def("gated_mlp", &gated_mlp, nb::arg("x"), nb::arg("gate"), nb::arg("up"), nb::arg("down"),
          nb::arg("activation"));
    m.def("heads", &heads, nb::arg("x"), nb::arg("parts"), nb::arg("eps"), nb::arg("cosines").none(),
          nb::arg("sines").none(), nb::arg("neighbours"));
}

}  // namespace quire
