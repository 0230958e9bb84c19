// What the kernels compute, and the table by which one instruction set's are called.
//
// Every result depends on its own row of the input alone: a row's bits are the same however many rows
// stand beside it and however the work is divided among threads. Each sum runs in one fixed order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quire {

// How a weight matrix `[columns, depth]` is stored. The packed ones are MLX's, but for fp8: E4M3 codes with a float32
// scale a group.
enum class Storage : int { float32, bfloat16, float16, affine, mxfp4, mxfp8, nvfp4, fp8 };

// A weight matrix, one row of memory for each column of the product.
struct Weight {
    Storage storage;
    int bits;                // of a code; 0 for floats
    int group;               // codes that share a scale
    int64_t columns, depth;  // of the product: y[rows, columns] = x[rows, depth] * w^T
    const void* values;      // floats, or codes
    const void* scales;      // floats for affine and fp8, else bytes
    const void* biases;      // as scales; affine only. Null: each is its scale times `bias_factor`
    const float* offsets;    // [columns] added to the product, or null
    Storage scale_type = Storage::float32;  // of affine's floats
    // Whether 16 columns lie together: words of codes are [columns / 16, depth * bits / 32, 16], and scales and
    // biases [columns / 16, depth / group, 16].
    bool tiled = false;
    float bias_factor = 0;
};

// Rows of x before a product: row r begins at values + places[r] * stride.
struct Source {
    const float* values;
    int64_t stride;
    const int32_t* places;  // null: row r is at place r
};

// Rows of a product. `arranged` holds them in the order in which a weight's codes are decoded.
struct Rows {
    int64_t count;
    const float* arranged;      // as `arrange` made them
    float* out;                 // row r of the product begins at out + places[r] * stride
    const int32_t* places;      // null: row r is at place r
    int64_t stride;
};

// Vectors of codes with a float16 scale (and bias) a group, or with a codebook and a scale each.
struct Coded {
    const void* codes;        // [vectors, size * bits / 32] words, as MLX packs them
    const uint16_t* scales;   // [vectors, size / group], or [vectors] with a codebook
    const uint16_t* biases;   // likewise; none with a codebook
    const float* levels;      // [2^bits] the codebook, or null
    int size, bits, group;
};

// A rotation of vectors: a Hadamard transform of their products with signs, or a product with a matrix
// `[size, size]`. `scale` multiplies the result.
struct VectorRotation {
    const float* signs;   // null: none
    const float* matrix;  // null: none
    int size;
    float scale;
    bool any() const { return signs || matrix; }
};

// How vectors become codes, and where they lie: see `Coded`.
struct Coding {
    const float* x;     // [vectors, dim]
    int dim, size;      // zeros are added up to `size` elements
    int bits, group;
    VectorRotation rotation;  // before they are coded
    const float* edges; // [2^bits - 1] between the levels of a codebook, or null: affine
    float reach;        // affine: half the range that codes span, in standard deviations; 0: all of it
    int refits;         // affine: how often scale and bias are fitted to the codes by least squares
    uint8_t* codes;
    uint16_t *scales, *biases;

    // The same, but that each vector's codes lie so many places later.
    Coding moved(int64_t places) const {
        Coding to = *this;
        const int64_t groups = edges ? 1 : size / group;
        to.codes += places * (size * bits / 8);
        to.scales += places * groups;
        if (biases) to.biases += places * groups;
        return to;
    }
};

// How the blocks of a pool are stored.
enum class Blocks : int {
    floats,    // keys and values as they are
    tokens,    // each key and each value is a coded vector
    channels,  // each channel of a block's keys is a coded vector, and each value is one
};

// A step's rows of one sequence, and its blocks. Head sizes and blocks are multiples of 16.
struct PagedRows {
    const float* q;        // [rows, heads, q_dim]
    float* out;            // [rows, heads, out_dim]
    const int32_t* table;  // block ids, by a block's number in the sequence
    const int32_t* first;  // [rows] first visible key
    const int32_t* last;   // [rows] last visible key
    int heads, kv_heads, key_dim, value_dim;
    int q_dim, out_dim;    // codes may be longer: queries are padded with zeros, outputs cut off
    int block;             // tokens
    VectorRotation key_rotation;    // of queries, before they meet codes
    VectorRotation value_rotation;  // undone in sums of coded values
    Blocks blocks;
    const void* keys;      // floats: [blocks * kv_heads, block, key_dim]
    const void* values;    // floats: [blocks * kv_heads, block, value_dim]
    Storage storage;       // floats: their type
    Coded coded_keys, coded_values;
    // Blocks from number `first_written` on are read as written, where codes are made of full blocks:
    // block `first_written + n` lies at place `written_place + n`.
    int first_written;     // INT32_MAX: none
    int64_t written_place;
    const float* written_keys;    // [places * kv_heads, block, key_dim]
    const float* written_values;  // [places * kv_heads, block, out_dim]
    float scale, softcap;  // softcap 0: none
    const float* sinks;    // [heads], or null
};

// The gated delta rule (arXiv:2412.06464): a matrix a value head forgets, takes in `beta` of the difference
// between a value and what it says of its key, and is read at the query. Queries, keys and values stand
// side by side; a key head serves consecutive value heads. A head forgets as a whole, or each of its
// columns by itself (Kimi Delta Attention, arXiv:2510.26692).
struct GatedDelta {
    const float* mixed;  // [sequences, tokens, 2 * key_heads * key_dim + value_heads * value_dim]
    const float* steps;  // [sequences, tokens, value_heads], or if `by_column` [.., value_heads, key_dim]
    const float* betas;  // [sequences, tokens, value_heads]: beta is most_correction * sigmoid(betas)
    const float* log_rates;    // [value_heads]
    const float* step_biases;  // as the steps of a token
    const float* before;  // [sequences, value_heads, value_dim, key_dim]
    float* after;         // likewise
    float* out;           // [sequences, tokens, value_heads, value_dim]
    int64_t tokens;
    int key_heads, value_heads, key_dim, value_dim;
    float eps;            // added to the squared lengths of keys and queries
    bool by_column;
    float most_correction;
    // Of x = step + step_bias and rate = exp(log_rate) the state keeps exp(-rate * softplus(x)), or if this
    // is below 0, exp(most_forgotten * sigmoid(rate * x)).
    float most_forgotten;
};

// A state space (Mamba, arXiv:2312.00752, and Mamba 2, arXiv:2405.21060): a matrix a head forgets, takes in
// values at the key, and is read at the query. Heads of one group share keys and queries.
struct StateSpace {
    const float* values;          // [sequences, tokens, heads, head_dim]
    const float *keys, *queries;  // [sequences, tokens, groups, state_dim]
    const float* steps;           // [sequences, tokens, heads]: the state keeps exp(rate * step)
    const float* rates;           // [heads], or if `by_column` [heads, state_dim]; at most 0
    const float* before;          // [sequences, heads, head_dim, state_dim]
    float* after;                 // likewise
    float* out;                   // [sequences, tokens, heads, head_dim]
    int64_t tokens;
    int heads, head_dim, groups, state_dim;
    bool by_column;
};

// A filter a channel over the last tokens; `silu` of the sum where it is asked for.
struct CausalConv {
    const float* window;  // [sequences, kernel - 1 + tokens, channels]
    const float* taps;    // [channels, kernel]
    const float* bias;    // [channels], or null
    float* out;           // [sequences, tokens, channels]
    int64_t tokens, channels;
    int kernel;           // 8 at most
    bool silu;
};

// Stacks of two thin matrices (LoRA, arXiv:2106.09685). Number 0 stands for none and is not read.
struct LowRank {
    const float* inner;  // [numbers, rank, depth]
    const float* outer;  // [numbers, rank, columns]
    int64_t depth, rank, columns;
};

constexpr int64_t kSampledTogether = 128;  // tokens of a block that sampling draws first

// Products of one instruction set.
struct Products {
    // Floats of so many arranged rows for a weight of this kind.
    int64_t (*arranged_floats)(const Weight& w, int64_t count);
    // Arranges rows [begin, end) of the `count` of x. `begin` is a multiple of `arranged_together(w)`, and `end` is one
    // or `count`.
    void (*arrange)(const Weight& w, const Source& x, int64_t count, int64_t begin, int64_t end, float* arranged);
    int64_t (*arranged_together)(const Weight& w);
    // Columns [begin, end) of a product. `scratch` holds `scratch_floats(w)`.
    void (*product)(const Weight& w, const Rows& rows, int64_t begin, int64_t end, float* scratch);
    int64_t (*scratch_floats)(const Weight& w);
    // Whether `product` reads codes of so many bits that lie in tiles.
    bool (*reads_tiles)(Storage storage, int bits);
};

struct Kernels : Products {
    Products bytes;  // by rows that become integers of 8 bits where weights are packed, instead of 16
    const char* name;
    int vector;  // floats in a vector

    // RMS norm of rows [begin, end): (residual + x / sqrt(mean(x^2) + eps) * weight) * factor[0]. Residual,
    // weight and factor may be null.
    void (*rms_norm)(const float* x, const float* weight, const float* residual, const float* factor,
                     float eps, int64_t depth, int64_t begin, int64_t end, float* out);
    // The hyperbolic tangent of elements [begin, end).
    void (*tanh)(const float* x, int64_t begin, int64_t end, float* out);
    // act(gate) * up over elements [begin, end); act: 0 silu, 1 gelu (tanh).
    void (*gate)(int act, const float* gate, const float* up, int64_t begin, int64_t end, float* out);
    // Rotates the first `dims` of each head in rows [begin, end), halves apart or neighbours paired. `out` may be
    // `x`, as in `rms_norm`.
    void (*rotate)(const float* x, const float* cosines, const float* sines, int64_t heads,
                   int64_t dim, int64_t dims, bool paired, int64_t begin, int64_t end, float* out);
    // Attention of the query heads of KV head `kv_head`, rows [begin, end).
    void (*attend)(const PagedRows& part, int kv_head, int64_t begin, int64_t end, float* scratch);
    int64_t (*attend_scratch_floats)(const PagedRows& part);
    // Vectors [begin, end) as codes; `scratch` holds three of them.
    void (*encode)(const Coding& coding, int64_t begin, int64_t end, float* scratch);
    // All tokens of one sequence, for one value head.
    void (*gated_delta)(const GatedDelta& rule, int64_t sequence, int value_head, float* scratch);
    int64_t (*gated_delta_scratch_floats)(const GatedDelta& rule);
    // All tokens of one sequence, for one head.
    void (*state_space)(const StateSpace& space, int64_t sequence, int head, float* scratch);
    int64_t (*state_space_scratch_floats)(const StateSpace& space);
    // Channels [begin, end) of one sequence, multiples of 16.
    void (*causal_conv)(const CausalConv& conv, int64_t sequence, int64_t begin, int64_t end);
    // The place of the largest of `count` numbers, the first of equal ones.
    int64_t (*best)(const float* x, int64_t count);
    // Weights 2 to the power of `factor * (x - best)`, 0 below `least`; of each `kSampledTogether` their sum and the
    // largest.
    void (*weigh_logits)(const float* x, int64_t count, float best, float factor, float least, float* weights,
                         float* blocks);
    // Rows [begin, end) of y + (x * inner) * outer, by each row's own matrices. `out` may be `y`.
    void (*add_low_rank)(const LowRank& factors, const float* x, const int32_t* numbers, const float* y,
                         int64_t begin, int64_t end, float* out);
};

// The kernels of `base` with other products, by rows of 16 bits and of 8.
inline Kernels with_products(const Kernels& base, const char* name, const Products& words, const Products& bytes) {
    Kernels kernels = base;
    static_cast<Products&>(kernels) = words;
    kernels.bytes = bytes;
    kernels.name = name;
    return kernels;
}

// Those of an instruction set, or null where this build or this processor has it not.
const Kernels* amx_kernels();   // the operations that are no products are AVX-512's
const Kernels* vnni_kernels();  // likewise
const Kernels* avx512_kernels();
const Kernels* avxvnni_kernels();  // likewise AVX2's
const Kernels* avx2_kernels();
const Kernels* i8mm_kernels();     // likewise NEON's
const Kernels* dotprod_kernels();  // likewise NEON's
const Kernels* baseline_kernels();  // of any processor: NEON's on arm64

// Those that this processor has, the fastest first.
std::vector<const Kernels*> available_kernels();

}  // namespace quire
