// What pools take in, as MLX operations.

#include "operation.h"

namespace quire {
namespace {

// Stores what its task says in pools, where they lie: if nobody else reads them, or always if `in_place`. Inputs: the
// pools, and what the task is made from; outputs: the pools.
//
// A reader's task that is queued holds a pool, though it runs before this one. MLX does not tell it from others, so
// `in_place` is for pools whose pending readers are all among what `make` is made from.
template <class Make> class Write : public mlx::core::Primitive {
public:
    Write(mlx::core::Stream stream, Make make, bool in_place)
        : Primitive(stream), make_(std::move(make)), in_place_(in_place) {}

    void eval_cpu(const std::vector<array>& inputs, std::vector<array>& pools) override {
        auto& encoder = mlx::core::cpu::get_command_encoder(stream());
        // Each output holds the inputs, though only one's are asked for: the others' would keep the pools in use.
        for (array& pool : pools) {
            if (&pool.inputs() != &inputs) pool.inputs().clear();
        }
        for (size_t i = 0; i < pools.size(); i++) {
            if ((in_place_ || inputs[i].is_donatable()) && inputs[i].flags().row_contiguous) {
                pools[i].copy_shared_buffer(inputs[i]);
            } else {
                pools[i].set_data(mlx::core::allocator::malloc(pools[i].nbytes()));
                encoder.dispatch(copying(inputs[i], pools[i]));
            }
        }
        encoder.dispatch(make_(in_rows(inputs, pools.size(), encoder), pools));
    }
    void eval_gpu(const std::vector<array>&, std::vector<array>&) override {
        throw std::runtime_error("quire's CPU kernels do not run on a GPU");
    }
    const char* name() const override { return "quire::write"; }

private:
    Make make_;
    bool in_place_;
};

// As where MLX assigns, the pools' Python objects become the pools after it.
template <class Make>
void write(const std::vector<array*>& pools, const std::vector<array>& from, Make make, bool in_place = false) {
    using namespace mlx::core;
    std::vector<array> inputs;
    std::vector<Shape> shapes;
    std::vector<Dtype> types;
    for (const array* pool : pools) {
        inputs.push_back(*pool);
        shapes.push_back(pool->shape());
        types.push_back(pool->dtype());
    }
    inputs.insert(inputs.end(), from.begin(), from.end());
    auto primitive = std::make_shared<Write<Make>>(default_stream(Device(Device::cpu)), std::move(make), in_place);
    const auto after = array::make_arrays(shapes, types, primitive, inputs);
    for (size_t i = 0; i < pools.size(); i++) pools[i]->overwrite_descriptor(after[i]);
}

std::vector<array*> arrays_of(const nb::list& pools) {
    std::vector<array*> arrays;
    for (const auto& pool : pools) arrays.push_back(&nb::cast<array&>(pool));
    return arrays;
}

// Where the vectors `[tokens, heads]` of a step lie in pools `[rows, block, elements]`.
struct Places {
    const int32_t *rows, *offsets;  // [tokens, heads], [tokens, 1]
    int64_t count, heads, block;

    // Among the pools' vectors.
    int64_t operator()(int64_t n) const { return rows[n] * block + offsets[n / heads]; }

    // From the inputs of an operation, of which these are the last.
    static Places at(const std::vector<array>& in, int64_t block) {
        const array &rows = in[in.size() - 2], &offsets = in.back();
        return {rows.data<int32_t>(), offsets.data<int32_t>(), (int64_t)rows.size(), rows.shape(1), block};
    }
    static void check(const array& rows, const array& offsets) {
        using namespace mlx::core;
        require(rows.dtype() == int32 && rows.ndim() == 2 && offsets.dtype() == int32 &&
                    offsets.size() == (size_t)rows.shape(0),
                "rows are int32 [tokens, heads], offsets int32 [tokens, 1]");
    }
};

// A pool of `elements` a vector, into which vectors of a step are written.
void check_pool(const array& pool, const array& first, int elements, mlx::core::Dtype type) {
    require(pool.ndim() == 3 && pool.shape(1) == first.shape(1) && pool.shape(2) == elements && pool.dtype() == type,
            "pools must be [rows, block, elements], of equal blocks");
}

// Pools `[rows, block, dim]` get vectors `[tokens, heads, dim]`, one array each, at `rows` [tokens, heads] and
// `offsets` [tokens, 1].
void write_vectors(const nb::list& list, const std::vector<array>& vectors, const array& rows, const array& offsets) {
    using namespace mlx::core;
    Places::check(rows, offsets);
    const std::vector<array*> pools = arrays_of(list);
    require(!pools.empty() && pools.size() == vectors.size(), "each pool gets vectors");
    std::vector<array> from;
    for (size_t i = 0; i < pools.size(); i++) {
        const array& pool = *pools[i];
        check_pool(pool, *pools[0], vectors[i].shape(-1), pool.dtype());
        require(vectors[i].ndim() == 3 && vectors[i].shape(0) == rows.shape(0) && vectors[i].shape(1) == rows.shape(1),
                "vectors must be [tokens, heads, dim]");
        from.push_back(astype(vectors[i], pool.dtype()));
    }
    from.insert(from.end(), {rows, offsets});
    write(pools, from, [](const std::vector<array>& in, std::vector<array>& out) {
        struct Copy {
            const char* from;
            char* to;
            int64_t bytes;
        };
        std::vector<Copy> copies;
        for (size_t i = 0; i < out.size(); i++) {
            const int64_t bytes = out[i].shape(2) * (int64_t)out[i].itemsize();
            copies.push_back({in[i].data<char>(), out[i].data<char>(), bytes});
        }
        return [copies, places = Places::at(in, out[0].shape(1))] {
            for (const Copy& each : copies)
                for (int64_t n = 0; n < places.count; n++)
                    std::memcpy(each.to + places(n) * each.bytes, each.from + n * each.bytes, each.bytes);
        };
    });
}

// The pool `[rows, ...]` gets `values` [n, ...] at `rows` [n], in place: whatever still reads the pool is an input of
// `values`.
void write_rows(const nb::object& place, const array& values, const array& rows) {
    using namespace mlx::core;
    array& pool = nb::cast<array&>(place);
    require(rows.dtype() == int32 && rows.ndim() == 1 && rows.size() > 0, "rows are int32 [n]");
    auto shape = pool.shape();
    shape[0] = rows.shape(0);
    require(values.shape() == shape, "values must be [n, ...], as the pool's rows");
    write({&pool}, {astype(values, pool.dtype()), rows}, [](const std::vector<array>& in, std::vector<array>& out) {
        return [from = in[0].data<char>(), row = in[1].data<int32_t>(), to = out[0].data<char>(),
                count = (int64_t)in[1].size(), bytes = (int64_t)(in[0].nbytes() / in[1].size())] {
            for (int64_t n = 0; n < count; n++) std::memcpy(to + row[n] * bytes, from + n * bytes, bytes);
        };
    }, true);
}

// Rows `targets` [n] of a pool become copies of what its rows `sources` [n] were. Few bytes are copied in this call if
// nothing is computed that the pool waits for, so that a small step after it runs at once, too. Otherwise one pool is an
// operation: MLX holds the outputs of one until it has run, and a step's write after it would copy them.
void copy_rows(const nb::object& place, const array& sources, const array& targets) {
    using namespace mlx::core;
    array& pool = nb::cast<array&>(place);
    for (const array& rows : {sources, targets}) {
        require(rows.dtype() == int32 && rows.ndim() == 1 && rows.size() == sources.size() && rows.size() > 0,
                "sources and targets are int32 [n]");
    }
    const auto make = [](const std::vector<array>& in, std::vector<array>& out) {
        return [from = in[0].data<int32_t>(), to = in[1].data<int32_t>(), count = (int64_t)in[0].size(),
                rows = out[0].data<char>(), bytes = (int64_t)(out[0].nbytes() / out[0].shape(0))] {
            std::vector<char> kept(count * bytes);  // a target may be a source, too
            for (int64_t n = 0; n < count; n++) std::memcpy(&kept[n * bytes], rows + from[n] * bytes, bytes);
            for (int64_t n = 0; n < count; n++) std::memcpy(rows + to[n] * bytes, &kept[n * bytes], bytes);
        };
    };
    const int64_t bytes = (int64_t)(sources.size() * (pool.nbytes() / pool.shape(0)));
    if (bytes <= kAtOnce && is_there(pool) && is_there(sources) && is_there(targets)) {
        std::vector<array> own = {pool};
        make({sources, targets}, own)();
        return;
    }
    write({&pool}, {sources, targets}, make, true);
}

// Rows `numbers` [n] of an array, [n, ...].
array rows_of(const array& x, const array& numbers) {
    using namespace mlx::core;
    require(numbers.dtype() == int32 && numbers.ndim() == 1 && x.ndim() > 0, "numbers of rows are int32 [n]");
    auto shape = x.shape();
    shape[0] = numbers.shape(0);
    const int64_t bytes = (int64_t)(x.nbytes() / x.shape(0));
    return operation("quire::rows_of", {shape}, {x, numbers}, [bytes](const std::vector<array>& in, std::vector<array>& out) {
        return [bytes, from = in[0].data<char>(), row = in[1].data<int32_t>(), to = out[0].data<char>(),
                count = (int64_t)in[1].size()] {
            for (int64_t n = 0; n < count; n++) std::memcpy(to + n * bytes, from + row[n] * bytes, bytes);
        };
    }, {x.dtype()}, bytes * numbers.shape(0))[0];
}

// How one array of vectors is coded, as `device.operations.VectorCoding` says it.
struct EncodedShape {
    int bits, group, dim, size, refits;
    float reach;
    size_t edges_at;  // among the inputs; 0: affine
    VectorRotationShape rotation;

    Coding coding(const std::vector<array>& in, size_t from, std::vector<array>& out, size_t& to) const {
        Coding c{in[from].data<float>(), dim, size, bits, group, rotation.at(in), nullptr, reach, refits,
                 nullptr, nullptr, nullptr};
        c.edges = edges_at ? in[edges_at].data<float>() : nullptr;
        c.codes = (uint8_t*)out[to++].data<char>();
        c.scales = (uint16_t*)out[to++].data<char>();
        if (!edges_at) c.biases = (uint16_t*)out[to++].data<char>();
        return c;
    }
};

struct VectorCoding {
    int size, bits, group;
    std::optional<array> edges, rotation;
    float scale, reach;
    int refits;
};

// How some arrays of vectors `[..., dim]` are coded: `inputs` are these, and what codings need.
struct EncodedArrays {
    std::vector<array> inputs;
    std::vector<EncodedShape> shapes;
    // Elements a vector and type of what each array becomes, end to end: codes, scales, and biases where affine.
    std::vector<std::pair<int, mlx::core::Dtype>> parts;

    EncodedArrays(const std::vector<array>& vectors, const std::vector<VectorCoding>& codings) : inputs(vectors) {
        using namespace mlx::core;
        require(!vectors.empty() && vectors.size() == codings.size(), "each array has a coding");
        for (size_t i = 0; i < vectors.size(); i++) {
            const auto& [size, bits, group, edges, rotation, scale, reach, refits] = codings[i];
            const int dim = vectors[i].shape(-1);
            require(vectors[i].dtype() == float32 && dim <= size, "vectors are float32, at most `size` long");
            require(size % 32 == 0 && (edges || (group % 32 == 0 && size % group == 0)),
                    "sizes and groups must be multiples of 32");
            require(bits >= 2 && bits <= 8 && bits != 7, "codes have 2, 3, 4, 5, 6 or 8 bits");
            size_t edges_at = 0;
            if (edges) {
                require(edges->dtype() == float32 && (int)edges->size() == (1 << bits) - 1, "edges lie between levels");
                edges_at = inputs.size();
                inputs.push_back(*edges);
            }
            shapes.push_back({bits, group, dim, size, refits, reach, edges_at,
                              VectorRotationShape(rotation, scale, size, inputs)});
            parts.emplace_back(size * bits / 32, uint32);
            parts.emplace_back(edges ? 1 : size / group, float16);
            if (!edges) parts.emplace_back(size / group, float16);
        }
    }
};

// Codings that an operation carries out, from its inputs to its outputs, and how many vectors each has.
struct Encoding {
    std::vector<Coding> codings;
    std::vector<int64_t> counts;

    Encoding(const std::vector<EncodedShape>& shapes, const std::vector<array>& in, std::vector<array>& out) {
        size_t to = 0;
        for (size_t i = 0; i < shapes.size(); i++) {
            codings.push_back(shapes[i].coding(in, i, out, to));
            counts.push_back((int64_t)in[i].size() / shapes[i].dim);
        }
    }

    // Calls `run(coding, begin, end, scratch)` with parts of each array's vectors.
    template <class Run> void each(const Run& run) const {
        for (size_t i = 0; i < codings.size(); i++) {
            const Coding& c = codings[i];
            split(counts[i], kLeastWork / (16 * c.size) + 1, 1, [&](int64_t begin, int64_t end) {
                run(c, begin, end, scratch(3 * (int64_t)c.size));
            });
        }
    }
};

// Arrays of vectors `[..., dim]` as codes: of each array codes [..., size * bits / 32], scales, and biases
// where they are affine, in one list.
std::vector<array> encode(const std::vector<array>& vectors, const std::vector<VectorCoding>& codings) {
    using namespace mlx::core;
    const EncodedArrays coded(vectors, codings);
    std::vector<Shape> outs;
    std::vector<Dtype> types;
    size_t part = 0;
    for (size_t i = 0; i < vectors.size(); i++) {
        for (int parts = codings[i].edges ? 2 : 3; parts > 0; parts--, part++) {
            outs.push_back(vectors[i].shape());
            outs.back().back() = coded.parts[part].first;
            types.push_back(coded.parts[part].second);
        }
    }
    return operation("quire::encode", outs, coded.inputs,
                     [shapes = coded.shapes](const std::vector<array>& in, std::vector<array>& out) {
        return [encoding = Encoding(shapes, in, out)] { encoding.each(kernels().encode); };
    }, types);
}

// What `encode` gives of vectors `[tokens, heads, dim]`, written to pools as `write_vectors` does.
void write_codes(const nb::list& list, const std::vector<array>& vectors, const std::vector<VectorCoding>& codings,
                 const array& rows, const array& offsets) {
    Places::check(rows, offsets);
    EncodedArrays coded(vectors, codings);
    const std::vector<array*> pools = arrays_of(list);
    require(pools.size() == coded.parts.size(), "each part of the codes has a pool");
    for (size_t i = 0; i < pools.size(); i++)
        check_pool(*pools[i], *pools[0], coded.parts[i].first, coded.parts[i].second);
    for (const array& each : vectors)
        require(each.ndim() == 3 && each.shape(0) == rows.shape(0) && each.shape(1) == rows.shape(1),
                "vectors must be [tokens, heads, dim]");
    coded.inputs.insert(coded.inputs.end(), {rows, offsets});
    write(pools, coded.inputs, [shapes = coded.shapes](const std::vector<array>& in, std::vector<array>& out) {
        return [encoding = Encoding(shapes, in, out), places = Places::at(in, out[0].shape(1))] {
            encoding.each([&](const Coding& c, int64_t begin, int64_t end, float* room) {
                for (int64_t n = begin; n < end; n++) kernels().encode(c.moved(places(n) - n), n, n + 1, room);
            });
        };
    });
}

}  // namespace

void bind_cache(nb::module_& m) {
    using Map = std::optional<array>;
    nb::class_<VectorCoding>(m, "VectorCoding")
        .def(nb::init<int, int, int, Map, Map, float, float, int>(), nb::arg("size"), nb::arg("bits"),
             nb::arg("group_size"), nb::arg("edges").none(), nb::arg("rotation").none(), nb::arg("scale"),
             nb::arg("reach"), nb::arg("refits"));
    m.def("encode", &encode, nb::arg("vectors"), nb::arg("codings"));
    m.def("write_vectors", &write_vectors, nb::arg("pools"), nb::arg("vectors"), nb::arg("rows"), nb::arg("offsets"));
    m.def("write_codes", &write_codes, nb::arg("pools"), nb::arg("vectors"), nb::arg("codings"), nb::arg("rows"),
          nb::arg("offsets"));
    m.def("rows_of", &rows_of, nb::arg("x"), nb::arg("numbers"));
    m.def("copy_rows", &copy_rows, nb::arg("pool"), nb::arg("sources"), nb::arg("targets"));
    m.def("write_rows", &write_rows, nb::arg("pool"), nb::arg("values"), nb::arg("rows"));
}

}  // namespace quire
