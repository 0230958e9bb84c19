// Steps of recurrent layers as MLX operations.

#include "operation.h"

namespace quire {
namespace {

// The gated delta rule over `n` sequences of `t` tokens, as `device.operations.Operations.gated_delta` says.
std::vector<array> gated_delta(const array& mixed, const array& steps, const array& betas,
                               const array& log_rates, const array& step_biases, const array& state,
                               int key_heads, float eps, float most_correction, float most_forgotten) {
    using namespace mlx::core;
    for (const array& each : {mixed, steps, betas, log_rates, step_biases, state})
        require(each.dtype() == float32, "all arrays must be float32");
    require(mixed.ndim() == 3 && state.ndim() == 4 && state.shape(0) == mixed.shape(0),
            "mixed is [n, t, channels], state [n, value_heads, value_dim, key_dim]");
    GatedDelta d{};
    d.tokens = mixed.shape(1);
    d.key_heads = key_heads;
    d.value_heads = state.shape(1);
    d.value_dim = state.shape(2);
    d.key_dim = state.shape(3);
    d.eps = eps;
    d.by_column = steps.ndim() == 4;
    d.most_correction = most_correction;
    d.most_forgotten = most_forgotten;
    require(d.value_heads % key_heads == 0, "the value heads are no multiple of the key heads");
    require(d.key_dim % 16 == 0, "key_dim is a multiple of 16");
    require(mixed.shape(2) == 2 * key_heads * d.key_dim + d.value_heads * d.value_dim,
            "mixed does not fit the heads");
    const size_t gates = (size_t)mixed.shape(0) * mixed.shape(1) * d.value_heads;
    const size_t columns = d.by_column ? d.key_dim : 1;
    require(steps.size() == gates * columns && betas.size() == gates, "each token and value head has gates");
    require((int)log_rates.size() == d.value_heads && step_biases.size() == d.value_heads * columns,
            "each value head has a rate and a bias, or a bias for each column");
    const Shape out_shape = {mixed.shape(0), mixed.shape(1), d.value_heads, d.value_dim};
    return operation("quire::gated_delta", {out_shape, state.shape()},
                     {mixed, steps, betas, log_rates, step_biases, state},
                     [d](const std::vector<array>& in, std::vector<array>& out) mutable {
        const float** places[] = {&d.mixed, &d.steps, &d.betas, &d.log_rates, &d.step_biases, &d.before};
        for (size_t i = 0; i < in.size(); i++) *places[i] = in[i].data<float>();
        d.out = out[0].data<float>();
        d.after = out[1].data<float>();
        return [d, sequences = (int64_t)in[0].shape(0)] {
            const int64_t each = d.tokens * d.value_dim * d.key_dim * 4;
            split(sequences * d.value_heads, kLeastWork / each + 1, 1, [&](int64_t begin, int64_t end) {
                float* room = scratch(kernels().gated_delta_scratch_floats(d));
                for (int64_t i = begin; i < end; i++)
                    kernels().gated_delta(d, i / d.value_heads, (int)(i % d.value_heads), room);
            });
        };
    });
}

// A state space over `n` sequences of `t` tokens, as `device.operations.Operations.state_space` says.
std::vector<array> state_space(const array& values, const array& keys, const array& queries, const array& steps,
                               const array& rates, const array& state) {
    using namespace mlx::core;
    for (const array& each : {values, keys, queries, steps, rates, state})
        require(each.dtype() == float32, "all arrays must be float32");
    require(values.ndim() == 4 && keys.ndim() == 4 && state.ndim() == 4,
            "values are [n, t, heads, head_dim], keys [n, t, groups, state_dim], "
            "state [n, heads, head_dim, state_dim]");
    StateSpace s{};
    s.tokens = values.shape(1);
    s.heads = values.shape(2);
    s.head_dim = values.shape(3);
    s.groups = keys.shape(2);
    s.state_dim = keys.shape(3);
    s.by_column = rates.ndim() == 2;
    const int64_t sequences = values.shape(0);
    require(s.heads % s.groups == 0, "the heads are no multiple of the groups");
    require(s.state_dim % 16 == 0, "state_dim is a multiple of 16");
    require(keys.shape(0) == sequences && keys.shape(1) == s.tokens && queries.shape() == keys.shape(),
            "each token and group has a key and a query");
    require((int64_t)steps.size() == sequences * s.tokens * s.heads, "each token and head has a step");
    require((int64_t)rates.size() == (int64_t)s.heads * (s.by_column ? s.state_dim : 1),
            "each head has a rate, or one for each column");
    require(state.shape() == Shape{(int)sequences, s.heads, s.head_dim, s.state_dim}, "state does not fit the heads");
    return operation("quire::state_space", {values.shape(), state.shape()},
                     {values, keys, queries, steps, rates, state},
                     [s](const std::vector<array>& in, std::vector<array>& out) mutable {
        const float** places[] = {&s.values, &s.keys, &s.queries, &s.steps, &s.rates, &s.before};
        for (size_t i = 0; i < in.size(); i++) *places[i] = in[i].data<float>();
        s.out = out[0].data<float>();
        s.after = out[1].data<float>();
        return [s, sequences = (int64_t)in[0].shape(0)] {
            const int64_t each = s.tokens * s.head_dim * s.state_dim * 3;
            split(sequences * s.heads, kLeastWork / each + 1, 1, [&](int64_t begin, int64_t end) {
                float* room = scratch(kernels().state_space_scratch_floats(s));
                for (int64_t i = begin; i < end; i++)
                    kernels().state_space(s, i / s.heads, (int)(i % s.heads), room);
            });
        };
    });
}

// A filter a channel: window [n, kernel - 1 + t, channels] by taps [channels, kernel] -> [n, t, channels].
array causal_conv(const array& window, const array& taps, const std::optional<array>& bias, bool silu) {
    using namespace mlx::core;
    require(window.dtype() == float32 && window.ndim() == 3, "window must be float32 [n, tokens, channels]");
    require(taps.dtype() == float32 && taps.ndim() == 2 && taps.shape(0) == window.shape(2),
            "taps must be float32 [channels, kernel]");
    CausalConv c{};
    c.channels = window.shape(2);
    c.kernel = taps.shape(1);
    c.tokens = window.shape(1) - c.kernel + 1;
    c.silu = silu;
    require(c.channels % 16 == 0 && c.kernel <= 8 && c.tokens > 0,
            "channels are a multiple of 16, a filter has 8 taps at most");
    std::vector<array> inputs = {window, taps};
    if (bias) {
        require(bias->dtype() == float32 && (int64_t)bias->size() == c.channels, "bias must be float32 [channels]");
        inputs.push_back(*bias);
    }
    const Shape shape = {window.shape(0), (int)c.tokens, (int)c.channels};
    return operation("quire::causal_conv", {shape}, inputs,
                     [c](const std::vector<array>& in, std::vector<array>& out) mutable {
        c.window = in[0].data<float>();
        c.taps = in[1].data<float>();
        c.bias = in.size() > 2 ? in[2].data<float>() : nullptr;
        c.out = out[0].data<float>();
        return [c, sequences = (int64_t)in[0].shape(0)] {
            const int64_t least = kLeastWork / (sequences * c.tokens * c.kernel) + 1;
            split(c.channels, least, 16, [&](int64_t begin, int64_t end) {
                for (int64_t n = 0; n < sequences; n++) kernels().causal_conv(c, n, begin, end);
            });
        };
    })[0];
}

}  // namespace

void bind_recurrent(nb::module_& m) {
    m.def("gated_delta", &gated_delta, nb::arg("mixed"), nb::arg("steps"), nb::arg("betas"), nb::arg("log_rates"),
          nb::arg("step_biases"), nb::arg("state"), nb::arg("key_heads"), nb::arg("eps"), nb::arg("most_correction"),
          nb::arg("most_forgotten"));
    m.def("state_space", &state_space, nb::arg("values"), nb::arg("keys"), nb::arg("queries"), nb::arg("steps"),
          nb::arg("rates"), nb::arg("state"));
    m.def("causal_conv", &causal_conv, nb::arg("window"), nb::arg("taps"), nb::arg("bias").none(), nb::arg("silu"));
}

}  // namespace quire
