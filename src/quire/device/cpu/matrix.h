// Weight matrices among an operation's inputs, and products with them.
#pragma once

#include "operation.h"

namespace quire {

Storage storage_of(const std::string& mode);

// Where the tensors of a weight are among an operation's inputs, and what they hold.
struct Tensors {
    Storage storage, scale_type;  // the type of affine's scales and biases
    int bits, group;
    bool has_biases, has_offsets, tiled;
    int64_t columns, depth;
    size_t first;  // of the inputs that are the weight's

    // `expert`: which matrix of a stack.
    Weight weight(const std::vector<array>& in, int64_t expert = 0) const;
    // The first `count` matrices of a stack.
    std::vector<Weight> stack(const std::vector<array>& in, int64_t count) const;
};

// A matrix `[columns, depth]`, or a stack of them, of floats or codes.
class Matrix {
public:
    Matrix(const array& weight, const std::optional<array>& scales, const std::optional<array>& biases,
           const std::optional<array>& offsets, int group, int bits, const std::string& mode, bool tiled);

    int64_t columns() const { return tensors_.columns; }
    int64_t depth() const { return tensors_.depth; }
    const array& values() const { return arrays_[0]; }

    // The weight where it lies, for as long as this object or a copy of it lives.
    Weight evaluated() const;
    std::vector<Weight> evaluated_stack() const;

    // Adds the matrix to the inputs.
    Tensors among(std::vector<array>& inputs) const;

private:
    std::vector<array> arrays_;
    Tensors tensors_;
};

// Number `at` of an array of floats.
float number_at(Storage type, const void* from, int64_t at);

// Shares out products of `rows` rows among the threads: calls `run(product, begin, end)` for ranges of columns.
void split_columns(const std::vector<int64_t>& columns, int64_t rows, int64_t depth,
                   const std::function<void(size_t, int64_t, int64_t)>& run);

// One of several products of the same rows.
struct Product {
    Weight weight;
    float* out;  // [rows, columns]
};

// Rows `[count, depth]` by each weight.
void multiply(const std::vector<Product>& products, const float* x, int64_t count);

// Pairs of rows and experts: pair `p` multiplies row `p / together` of x by the matrix `ids[p]` of the stack.
void multiply_experts(const std::vector<Weight>& stack, const int32_t* ids, int64_t pairs, int64_t together,
                      const float* x, float* y);

// Sums of y [rows, k, width] by weights [rows, k], for rows [begin, end).
void mix_rows(const float* y, const float* weights, int64_t k, int64_t width, int64_t begin, int64_t end, float* out);

// Whether rows are arranged alike for both.
bool alike(const Weight& a, const Weight& b);

// The same for weights that are alike, and rows that are arranged for them.
void multiply_arranged(const std::vector<Product>& products, const float* arranged, int64_t count);

}  // namespace quire
