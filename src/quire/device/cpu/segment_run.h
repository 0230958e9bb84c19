// A segment while it is built, and its runs as MLX operations.
#pragma once

#include "segment.h"

namespace quire {

// One run of a segment. Inputs: pools, arrays of states, given values, each KV group's tables, the rows' own keys if
// there are groups, and of each group of recurrent layers its state rows. Outputs: the segment's, then pools and
// states, where they lie: the step before may still hold them while it runs. Whatever else reads them must have been
// launched.
class SegmentRun : public mlx::core::Primitive {
public:
    // `kept`: pools and arrays of states, of which `states` are the latter.
    SegmentRun(mlx::core::Stream stream, std::shared_ptr<const SegmentBody> body, size_t kept, size_t states,
        std::vector<std::vector<int64_t>> sizes)
        : Primitive(stream), body_(std::move(body)), kept_(kept), states_(states), sizes_(std::move(sizes)) {}

    void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
        auto& encoder = mlx::core::cpu::get_command_encoder(stream());
        // Each output holds the inputs, though only one's are asked for: the others' would keep the pools in use.
        for (array& out : outputs)
            if (&out.inputs() != &inputs) out.inputs().clear();
        const size_t values = outputs.size() - kept_;
        for (size_t i = 0; i < values; i++) outputs[i].set_data(mlx::core::allocator::malloc(outputs[i].nbytes()));
        for (size_t i = 0; i < kept_; i++) {
            array& pool = outputs[values + i];
            if (inputs[i].flags().row_contiguous) {
                pool.copy_shared_buffer(inputs[i]);
            } else {
                pool.set_data(mlx::core::allocator::malloc(pool.nbytes()));
                encoder.dispatch(copying(inputs[i], pool));
            }
        }
        encoder.dispatch([body = body_, frame = frame_of(in_rows(inputs, kept_, encoder), outputs)]() mutable {
            body->run(frame);
        });
    }
    void eval_gpu(const std::vector<array>&, std::vector<array>&) override {
        throw std::runtime_error("quire's CPU kernels do not run on a GPU");
    }
    const char* name() const override { return "quire::segment"; }

    // Computes the values in this thread if they are little work, and if all inputs are there. Pools and states are
    // written to where they lie.
    std::optional<std::vector<array>> values_at_once(const std::vector<array>& inputs,
                                                     const std::vector<mlx::core::Shape>& shapes,
                                                     const std::vector<mlx::core::Dtype>& types) const {
        if (!std::all_of(inputs.begin(), inputs.end(), is_there)) return std::nullopt;
        const auto kept = inputs.begin() + (int64_t)kept_;
        std::vector<array> outputs;
        for (size_t i = 0; i < body_->outputs().size(); i++) outputs.push_back(computed(shapes[i], types[i]));
        outputs.insert(outputs.end(), inputs.begin(), kept);
        Frame frame = frame_of({kept, inputs.end()}, outputs);
        if (body_->work(frame) > kAtOnce) return std::nullopt;
        body_->run(frame);
        outputs.resize(body_->outputs().size(), outputs[0]);
        return outputs;
    }

private:
    Frame frame_of(const std::vector<array>& rows, std::vector<array>& outputs) const {
        Frame frame{};
        frame.rows = rows[0].shape(0);
        frame.values.resize(body_->values());
        frame.strides.resize(body_->values());
        size_t at = 0;
        for (const int value : body_->given()) frame.values[value] = const_cast<float*>(rows[at++].data<float>());
        for (const auto& sizes : sizes_) frame.groups.emplace_back(rows[at++].data<int32_t>(), sizes);
        if (!sizes_.empty()) frame.keys = rows[at++].data<int32_t>();
        for (; at < rows.size(); at++) frame.state_rows.push_back({rows[at].data<int32_t>()});
        size_t to = 0;
        for (const int value : body_->outputs()) frame.values[value] = outputs[to++].data<float>();
        for (; to < outputs.size(); to++) {
            array& pool = outputs[to];
            if (outputs.size() - to <= states_) {
                frame.states.push_back({pool.data<float>(), (int64_t)pool.size() / pool.shape(0)});
                continue;
            }
            frame.pools.push_back({pool.data<char>(), storage_of(pool), pool.shape(0), pool.shape(1), pool.shape(2)});
        }
        return frame;
    }

    std::shared_ptr<const SegmentBody> body_;
    size_t kept_, states_;
    std::vector<std::vector<int64_t>> sizes_;  // of each group's tables
};

// A segment while it is built, and its runs.
struct Segment {
    std::shared_ptr<SegmentBody> body = std::make_shared<SegmentBody>();

    // Runs the segment on given values `[T, ...]`. As where MLX assigns, the Python objects of pools and states become
    // the arrays after it.
    // `at_once`: whether nothing else reads or writes the pools, so that a small step may be computed in this call.
    std::vector<array> run(const std::vector<array>& given, const std::vector<TableArrays>& tables,
                           const std::optional<array>& keys, const nb::list& list, const nb::list& states,
                           const std::vector<array>& state_rows, bool at_once) const {
        using namespace mlx::core;
        require(!given.empty() && given.size() == body->given().size(), "the segment is given other values");
        const int count = given[0].shape(0);
        std::vector<array*> pools;
        for (const auto& pool : list) pools.push_back(&nb::cast<array&>(pool));
        for (const auto& each : states) pools.push_back(&nb::cast<array&>(each));
        std::vector<array> inputs;
        for (const array* pool : pools) inputs.push_back(*pool);
        for (size_t i = 0; i < given.size(); i++) {
            const int value = body->given()[i];
            require(given[i].dtype() == (body->integers(value) ? int32 : float32) && given[i].shape(0) == count &&
                        (int64_t)given[i].size() == count * body->width(value),
                    "given values must be of their type, with a row for each of the step's");
            inputs.push_back(given[i]);
        }
        std::vector<std::vector<int64_t>> sizes;
        for (const TableArrays& each : tables) {
            inputs.push_back(each.all);
            sizes.push_back(each.sizes);
        }
        if (!tables.empty()) {
            require(keys && keys->dtype() == int32 && (int)keys->size() == count, "each row has its own key");
            inputs.push_back(*keys);
        }
        for (const array& each : state_rows) {
            require(each.dtype() == int32, "state rows are int32");
            inputs.push_back(each);
        }
        std::vector<Shape> shapes;
        std::vector<Dtype> types;
        for (const auto& shape : body->output_shapes()) {
            types.push_back(body->integers(body->outputs()[shapes.size()]) ? int32 : float32);
            shapes.push_back({count});
            shapes.back().insert(shapes.back().end(), shape.begin(), shape.end());
        }
        const size_t values = shapes.size();
        for (const array* pool : pools) {
            const bool is_state = shapes.size() - values >= list.size();
            require(is_state ? pool->dtype() == float32 : pool->ndim() == 3,
                    "pools are [rows, block, dim], and states float32");
            shapes.push_back(pool->shape());
            types.push_back(pool->dtype());
        }
        auto primitive = std::make_shared<SegmentRun>(default_stream(Device(Device::cpu)), body, pools.size(),
                                                      states.size(), sizes);
        if (at_once)
            if (auto values = primitive->values_at_once(inputs, shapes, types)) return *values;
        auto made = array::make_arrays(shapes, types, primitive, inputs);
        for (size_t i = 0; i < pools.size(); i++) pools[i]->overwrite_descriptor(made[values + i]);
        made.resize(values, made[0]);
        return made;
    }

    template <class Made, class... Arguments> void add(Arguments&&... arguments) {
        body->add(std::make_unique<Made>(std::forward<Arguments>(arguments)...));
    }
};

// Add the instructions of each file.
using SegmentClass = nb::class_<Segment>;
void bind_segment_attention(SegmentClass& segment);
void bind_segment_elements(SegmentClass& segment);
void bind_segment_products(SegmentClass& segment);
void bind_segment_rows(SegmentClass& segment);
void bind_segment_states(SegmentClass& segment);
void bind_segment_tables(SegmentClass& segment);

}  // namespace quire
